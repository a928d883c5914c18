"""A process on an engine's node, without the engine."""

import os
import signal
import sys

import pytest

from jdist.launchers.place import Place
from tests.launcher.launch_children import await_gone, is_alive

# A process with one in its group; both would sleep on.
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getppid(), os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def read_to_the_end(place: Place) -> tuple[bytes, bytes, int]:
    out = err = b""
    while True:
        more_out, more_err, code = place.read()
        out, err = out + more_out, err + more_err
        if code is not None:
            return out, err, code


@pytest.mark.parametrize("victim", [0, 1], ids=["guard", "process"])
@pytest.mark.skipif(sys.platform != "linux", reason="the end of a guard reaches its process on Linux only")
def test_what_is_killed_leaves_nothing(victim):
    place = Place("127.0.0.1")
    place.start(["", "-c", FAMILY], {}, os.getcwd())
    out = b""
    while not out.endswith(b"\n"):
        out += place.read()[0]
    pids = list(map(int, out.split()))
    assert all(map(is_alive, pids))
    os.kill(pids[victim], signal.SIGKILL)
    assert read_to_the_end(place)[2] == -signal.SIGKILL
    await_gone(*pids)


def test_output_and_exit_code():
    place = Place("127.0.0.1")
    program = "import os, sys; print(os.environ['X']); print('b', file=sys.stderr); sys.exit(3)"
    place.start(["", "-c", program], {"X": "a"}, "/no/such/folder")
    assert read_to_the_end(place) == (b"a\n", b"b\n", 3)
