"""What an engine places, without the engine: a process on a node, and a launch that waits for room."""

import os
import signal
import sys
import threading
import types

import pytest

from jdist.launcher.events import Settings
from jdist.launcher.exit_cause import WORKER, Task
from jdist.launcher.loop import Launcher
from jdist.launcher.output import Console, LogFile
from jdist.launcher.process import Process
from jdist.launcher.ray import ActorPipe, Place
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
    place = Place()
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
    place = Place()
    program = "import os, sys; print(os.environ['X']); print('b', file=sys.stderr); sys.exit(3)"
    place.start(["", "-c", program], {"X": "a"}, "/no/such/folder")
    assert read_to_the_end(place) == (b"a\n", b"b\n", 3)


class Full:
    """A host without room, which waits for some until the user has asked to stop."""

    def __init__(self, sent: list[signal.Signals]):
        self.sent = sent
        self.asked: list[bool] = []

    def place(self, tasks, is_asked):
        for number in self.sent:
            os.kill(os.getpid(), number)
            self.asked.append(is_asked())
        raise OSError("no room")

    def start(self, *_):
        raise AssertionError("there was no room")


@pytest.mark.parametrize(
    ("sent", "asked", "code"),
    [
        ([], [], 126),
        ([signal.SIGUSR1], [False], 126),  # of the program that launches
        ([signal.SIGUSR1, signal.SIGTERM], [False, True], 143),
        ([signal.SIGINT], [True], 130),
    ],
)
def test_a_launch_without_room_that_is_asked_to_stop(tmp_path, sent, asked, code):
    settings = Settings(smallest=1, largest=2, max_restarts=3, grace_s=1.0, stop_timeout_s=1.0, regrow_s=60.0, seed=0)
    host = Full(sent)
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        end = Launcher(settings, ["true"], log_dir=tmp_path, host=host).run("2 processes")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (host.asked, end.exit_code, len(end.attempts)) == (asked, code, 1)
    assert heard == [each for each in sent if each == signal.SIGUSR1]


class FakeRay:
    """Ray with one actor, whose output fills the launcher's pipe, and which is gone once that is closed."""

    class exceptions:
        class RayError(Exception):
            pass

    def __init__(self):
        self.killed = threading.Event()

    def get(self, answer, timeout):
        if answer == "start":
            return
        if self.killed.wait(10):
            raise self.exceptions.RayError("The actor died")

    def kill(self, actor, no_restart):
        self.killed.set()


class FakeActor:
    def __getattr__(self, name):
        return types.SimpleNamespace(remote=lambda *_: name)


def test_an_actor_that_is_gone_when_nobody_reads_any_more_ends_its_thread_quietly(tmp_path, monkeypatch):
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    task = Task(WORKER, 0)
    pipe = ActorPipe(FakeRay(), FakeActor(), task, ["true"], {}, str(tmp_path))
    process = Process(task, pipe, log=LogFile(tmp_path / "log"), prefixes=(b"", b""), console=Console())
    (thread,) = (each for each in threading.enumerate() if each.name == "Ray actor of process 0")
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream in process.streams:
        os.dup2(nothing, stream.pipe)  # closes the end that is read
    os.close(nothing)
    process.abandon()
    thread.join(10)
    assert not thread.is_alive()
    assert raised == []
