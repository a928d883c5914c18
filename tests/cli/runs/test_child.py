"""A process under the launcher's guard: its exit code, its output, the signals that it gets."""

import os
import signal
import sys
import threading

import pytest

from jdist.cli.runs.sweep import Stop, run_child
from jdist.errors import ConfigError


def python(code):
    return [sys.executable, "-I", "-S", "-c", code]


@pytest.mark.parametrize(("code", "returned"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_its_exit_code_or_its_signal(tmp_path, code, returned):
    assert run_child(python(code), tmp_path / "log", Stop()) == returned


def test_both_of_its_streams_go_to_the_log(tmp_path):
    run_child(python("import sys; print('out', flush=True); print('err', file=sys.stderr)"), tmp_path / "log", Stop())
    assert (tmp_path / "log").read_text() == "out\nerr\n"
    with pytest.raises(ConfigError, match="cannot be written"):
        run_child(python("pass"), tmp_path / "none" / "log", Stop())


@pytest.mark.parametrize("times", [1, 2])
def test_the_first_signal_is_passed_on_and_the_second_kills(tmp_path, times):
    """The child says by a pipe that it is ready, and when the first signal came; a thread here then sends it."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    end = "sys.exit(7)" if times == 1 else "say()"
    code = (
        "import os, signal, sys\n"
        f"pipe = os.open({str(fifo)!r}, os.O_WRONLY)\n"
        "def say(*_): os.write(pipe, b'x')\n"
        f"def on_signal(*_): {end}\n"
        "signal.signal(signal.SIGINT, on_signal)\n"
        "say()\n"
        "while True: signal.pause()\n"
    )

    def send():
        with fifo.open() as pipe:
            for _ in range(times):
                pipe.read(1)
                os.kill(os.getpid(), signal.SIGINT)

    stop, before = Stop(), signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=send)
    with stop.listening():
        thread.start()
        assert run_child(python(code), tmp_path / "log", stop) == (7 if times == 1 else -signal.SIGKILL)
    thread.join(timeout=10)
    assert stop.exit_code == 130
    assert signal.getsignal(signal.SIGINT) == before
