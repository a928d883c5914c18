import signal

import pytest

from jdist.launcher.exit_cause import Attempt, End, Task, failure, summary, verdict

TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: no\n'


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
