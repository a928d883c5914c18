import subprocess
import sys

import pytest

from jdist.launcher.exit_cause import LONGEST, cause, explanation


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
