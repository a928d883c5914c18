"""The cause of an attempt's end: what an end means, which process is guilty, and the report of it."""

import signal
import subprocess
import sys

import pytest

from jdist.launcher.exit_cause import (
    LONGEST,
    Attempt,
    End,
    Kind,
    Task,
    cause,
    count_lost,
    describe,
    exit_code,
    explanation,
    failure,
    find_guilty,
    kind,
    restart_may_help,
    summary,
    verdict,
)

TERM, KILL = signal.SIGTERM, signal.SIGKILL


def end(code, index=0, at=0.0, sent=None):
    return End(task=Task("worker", index), code=code, at=at, sent=sent)


@pytest.mark.parametrize(
    ("code", "sent", "meaning"),
    [
        (0, None, Kind.WELL),
        (0, KILL, Kind.WELL),
        (1, None, Kind.CRASHED),
        (1, TERM, Kind.CRASHED),
        (-9, None, Kind.CRASHED),
        (-15, None, Kind.CRASHED),
        (-9, KILL, Kind.STALLED),
        (-11, KILL, Kind.CRASHED),
        (75, None, Kind.PEER_LOST),
        (143, None, Kind.LEFT),
        (130, None, Kind.LEFT),
        (143, TERM, Kind.WELL),
        (-15, TERM, Kind.WELL),
    ],
)
def test_what_an_end_means(code, sent, meaning):
    assert kind(end(code, sent=sent)) == meaning


@pytest.mark.parametrize(
    ("ends", "index"),
    [
        ([end(0), end(0, 1)], None),
        ([end(75, 0, 1.0), end(-9, 1, 2.0)], 1),
        ([end(1, 0, 2.0), end(-9, 1, 1.0)], 1),
        ([end(143, 0, 1.0), end(75, 1, 0.0)], 0),
        ([end(75, 0, 1.0), end(-9, 1, 9.0, KILL)], 1),
        ([end(1, 0, 1.0), end(-9, 1, 9.0, KILL)], 0),
        ([end(75, 0, 2.0), end(75, 1, 1.0)], 1),
    ],
)
def test_who_is_guilty(ends, index):
    found = find_guilty(ends)
    assert (found and found.task.index) == index


@pytest.mark.parametrize(
    ("ends", "number"),
    [
        ([end(0)], 0),
        ([end(75), end(75, 1)], 0),
        ([end(143), end(143, 1)], 0),
        ([end(1, 0, 1.0), end(1, 1, 2.0), end(-6, 2, 3.0)], 1),
        ([end(-9, 0, 1.0), end(-9, 1, 1.0), end(75, 2, 2.0)], 2),
        ([end(1, 0, 1.0), end(-9, 1, 9.0, KILL)], 1),
    ],
)
def test_how_many_to_do_without(ends, number):
    assert count_lost(ends) == number


@pytest.mark.parametrize(("code", "expected"), [(3, 3), (-9, 137), (-64, 192)])
def test_exit_codes(code, expected):
    assert exit_code(end(code)) == expected


def test_what_no_restart_mends():
    assert [code for code in (-9, 1, 2, 3, 74, 75, 126, 127, 143) if not restart_may_help(end(code))] == [
        2,
        74,
        126,
        127,
    ]


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (end(1), "ended with exit code 1"),
        (end(-11), "was killed by SIGSEGV"),
        (end(-50), "was killed by signal 50"),
        (end(75), "ended with exit code 75 (it lost a peer)"),
        (end(143), "ended with exit code 143 (asked to stop, not by the launcher)"),
        (end(-9, sent=KILL), "did not end and had to be killed"),
    ],
)
def test_in_words(ended, words):
    assert describe(ended) == words


# ---- what a process said


def stderr_of(code):
    return subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False).stderr


SIMPLE = stderr_of("print('before', file=__import__('sys').stderr)\ndef f():\n    raise ValueError('no luck')\nf()")
CHAINED = stderr_of(
    "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('k') from None if 0 else ValueError()"
)
GROUP = stderr_of("raise ExceptionGroup('two', [ValueError('a'), KeyError('b')])")
DEEP = stderr_of("def f(n):\n    f(n - 1) if n else g()\ndef g():\n    h()\nf(3)\n") and stderr_of(
    "names = [f'f{n}' for n in range(60)]\n"
    "for a, b in zip(names, names[1:] + ['last']):\n    exec(f'def {a}():\\n    {b}()')\n"
    "def last():\n    raise ValueError('line one\\n' + '\\n'.join(map(str, range(50))))\nf0()"
)


def test_the_last_traceback():
    lines = explanation(SIMPLE)
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: no luck"
    assert "before" not in lines


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        (SIMPLE, "ValueError: no luck"),
        (SIMPLE + "\n" + SIMPLE.replace("luck", "bread"), "ValueError: no bread"),
        (CHAINED, "KeyError: 'k'"),
        (GROUP, "ExceptionGroup: two (2 sub-exceptions)"),
        ("jdist: no such config\n\n", "jdist: no such config"),
        (
            "killed by hand\n"
            "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
            "F0000 00:00:1795443783.681930   32019 client.cc:80] Terminating process because the JAX distributed service\n"
            "*** Check failure stack trace: ***\n    @     0x7f11  absl::LogMessage::SendToLog()\n",
            "killed by hand",
        ),
        (
            "jdist: PeerLostError: process 1 (n1:2222) is lost: it stands still.\njdist: process 1, step 3: its own code\n"
            'jdist:     loader.py:3 read\njdist: peer lost {"error": "PeerLostError"}\n',
            "jdist: PeerLostError: process 1 (n1:2222) is lost: it stands still.",
        ),
        ("E1123 12:00:00.1 1 xla.cc:1] out\n", "E1123 12:00:00.1 1 xla.cc:1] out"),
        ("", ""),
        ("Traceback (most recent call last):\n", ""),
    ],
)
def test_the_cause_in_one_line(stderr, expected):
    assert cause(stderr) == expected


TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: no\n'
WARNED = "train.py:3: UserWarning: too few rows\n  warnings.warn(text)\n"
UNVERIFIED = "eval_step: verify could not compare the step, which runs in several processes.\n"


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        (WARNED, ""),
        (UNVERIFIED, ""),
        ("reading shard 3\n", ""),
        ("jdist: process 0, step 5: in f\n", ""),
        (TRACEBACK + WARNED, "ValueError: no"),
    ],
)
def test_a_killed_process_says_why_only_in_a_report_of_it(stderr, expected):
    assert cause(stderr, killed=True) == expected
    assert bool(explanation(stderr, killed=True)) == bool(expected)
    assert WARNED.splitlines()[0] not in cause(f"bad input\n{WARNED}")


@pytest.mark.parametrize("code", [-6, -11, 1])
def test_a_crash_of_its_own_is_explained_by_its_last_lines(code):
    assert not end(code).was_killed
    assert end(-9).was_killed
    assert cause("double free or corruption (out)\n") == "double free or corruption (out)"


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: server said: app.py:12: UserWarning: bad shape",
        "AssertionError: step: verify found 3 leaves",
        "jdist: train.py: verify could not do it",
    ],
)
def test_a_cause_that_looks_like_a_warning_is_kept(message):
    assert cause(f"{message}\n") == message


@pytest.mark.timeout(60)  # the time of unanchored patterns grows with the square of its length
def test_a_bar_of_one_long_line_keeps_nobody_waiting():
    assert cause("\r".join(f"{n}/9999 loss: 0.5:" for n in range(15_000))) == "14999/9999 loss: 0.5:"


def test_a_group_keeps_its_members():
    assert any("ValueError: a" in line for line in explanation(GROUP))


def test_a_long_traceback_keeps_its_beginning_its_end_and_the_message():
    lines = explanation(DEEP)
    assert len(lines) == LONGEST
    assert lines[0].startswith("Traceback")
    assert "ValueError: line one" in lines
    assert any("lines left out" in line for line in lines)
    assert "in last" in lines[lines.index("ValueError: line one") - 1]


def test_without_a_traceback_the_last_lines():
    assert explanation("".join(f"{n}\n" for n in range(100)) + "\n") == [str(n) for n in range(92, 100)]


def test_nothing_said_explains_nothing():
    assert explanation("") == []


# ---- the report


def attempt(number, code=None, duration_s=2.0, outcome="failed", others=()):
    guilty = None if code is None else End(task=Task("worker", 1), code=code, at=duration_s)
    ends = (guilty, *others) if guilty else ()
    return Attempt(number=number, size=2, duration_s=duration_s, ends=ends, guilty=guilty, outcome=outcome)


def log_of(task):
    return f"logs/process_{task.label}.log"


LOST = """\
jdist: process 0 is lost: the others have waited for it for 6 s, and it is in the program's own code, a.py:20 gen. ...
jdist: process 0, step 30: the program's own code
jdist:     a.py:20 gen
jdist: peer lost {"error": "PeerLostError", "process": 0, "cause": "the others have waited for it for 6 s", "places": []}
"""


def test_who_left_first_is_not_to_blame_for_whom_it_lost():
    followed = End(task=Task("worker", 0), code=75, at=3.0)
    head, *said = failure(attempt(0, 75, others=(followed,)), log_of, LOST).splitlines()
    assert head == (
        "attempt 0 failed: process 0 was lost: the others have waited for it for 6 s; its log: logs/process_0.log"
    )
    assert said == [f"  {LOST.splitlines()[0]}"]  # no frames, no record
    cut_off = LOST[: LOST.index(', "cause"')]
    assert failure(attempt(0, 75, others=(followed,)), log_of, cut_off).startswith("attempt 0 failed: process 1 ended")


def test_a_failure_names_process_end_log_and_traceback():
    text = failure(attempt(3, -9), log_of, TRACEBACK)
    assert text.splitlines() == [
        "attempt 3 failed: process 1 was killed by SIGKILL; its log: logs/process_1.log",
        *(f"  {line}" for line in TRACEBACK.splitlines()),
    ]


BY_JAX = """\
jdist: the machine of process 0 does not answer
E1127 08:33:23.2 1 coordination_service_agent.cc:332] Polling an error
F1127 08:33:23.3 1 client.h:80] Terminating process because the JAX distributed service detected fatal errors. UNAVAILABLE:
0
The tasks have crashed. Check the task logs for an earlier error.

RPC: /xla.coordination.CoordinationService/PollForError
    @     0x7f6dc94a71f5  (unknown)
"""


def test_what_jax_says_as_it_ends_a_process_does_not_come_first():
    head, *said = failure(attempt(0, -6), log_of, BY_JAX).splitlines()
    assert "process 1 was ended by JAX (SIGABRT), as process 0, or its machine, was gone" in head
    assert said == ["  jdist: the machine of process 0 does not answer"]
    ended = attempt(0, -6)
    assert "was ended by JAX (SIGABRT)" in verdict(ended, ended.ends[0], BY_JAX)
    assert "was killed by SIGABRT" in verdict(ended, ended.ends[0], "")  # by another


def test_a_failure_counts_those_that_followed():
    followed = End(task=Task("worker", 0), code=75, at=3.0)
    killed = End(task=Task("worker", 2), code=-9, at=9.0, sent=signal.SIGKILL)
    text = failure(attempt(0, 1, others=(followed, killed)), log_of, "")
    assert "(1 noticed and left; process 2 had to be killed)" in text


@pytest.mark.parametrize("only", [attempt(0, outcome="finished"), attempt(0, 1)])
def test_one_attempt_needs_no_summary(only):
    assert summary([only], {0: "a"}) == ""


def test_each_attempt_has_its_line():
    history = [attempt(0, 1, 100.0), attempt(1, outcome="grown"), attempt(2, outcome="finished")]
    assert summary(history, {0: "ValueError: no"}).splitlines() == [
        "attempt 0: 2 processes, 100.0 s: process 1 ended with exit code 1: ValueError: no",
        "attempt 1: 2 processes, 2.0 s: stopped, to go on with more",
        "attempt 2: 2 processes, 2.0 s: finished",
    ]


@pytest.mark.parametrize(
    ("history", "causes", "attempts"),
    [
        ([attempt(0, 1), attempt(1, 1)], {0: "a", 1: "a"}, 2),
        ([attempt(0, 1), attempt(1, -9), attempt(2, 1), attempt(3, 1)], {0: "a", 2: "a", 3: "a"}, 2),
        ([attempt(0, 1), attempt(1, 1)], {0: "a", 1: "b"}, None),
        ([attempt(0, 1), attempt(1, -9)], {}, None),
        ([attempt(0, 1, 100.0), attempt(1, 1, 100.0)], {0: "a", 1: "a"}, None),
        ([attempt(0, 1), attempt(1, 1), attempt(2, outcome="finished")], {0: "a", 1: "a"}, None),
    ],
)
def test_a_crash_loop_is_several_alike_soon_after_their_start(history, causes, attempts):
    last = summary(history, causes).splitlines()[-1]
    assert last.startswith("crash loop") == (attempts is not None)
    if attempts is not None:
        assert f"{attempts} attempts in a row" in last
        assert last.endswith(": a")
