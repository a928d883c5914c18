"""A small process round each process of a job, which kills all that this has started once it or the launcher is gone.

    launcher ──socket──> guard (own session) ──> process (own session) ──> what it starts

It is run by path with `python -I -S`, imports nothing of jdist and little of Python, and so starts in 20 ms. Standard input
is the socket. The launcher sends signals for the process, a byte each; end of file means that the launcher is gone, and then
all are killed at once. The guard sends a line when the process has started (`pid`) and one when it has ended (exit code,
time). Once the guard itself has ended, all are gone.

On Linux orphans come to the guard (a "subreaper"), so it finds processes in sessions of their own as well; elsewhere it
kills the process group.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable

SWEEP_S = 5.0  # longer than a process takes to die unless the kernel holds it
JUST_NOW_S = 10.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_direct: dict[int, float] = {}  # signals that the guard itself was sent: number -> when


def main(command: list[str]) -> None:
    """Runs a program with its arguments until it ends or the launcher does."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    woken = _wake_on_signals()
    pid = _start(command)
    _send(f"{pid}\n")
    returned = None
    while returned is None:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            returned = _reap(pid)
        if 0 in ready and returned is None:
            numbers = _read()
            for number in numbers:
                _pass_on(pid, number)
            if not numbers:
                _sweep(pid, woken)
                return
    _send(f"{returned} {time.monotonic()}\n")
    _sweep(pid, woken)


def _start(command: list[str]) -> int:
    """Starts the process in a session of its own; an error is written to its standard error."""
    guard = os.getpid()
    # Blocked until the child has the system's handlers: the guard's would swallow its signals.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    pid = os.fork()  # no threads here, so all of Python may be used in the child
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (*_ENDING, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # should the guard itself be killed
        if os.getppid() != guard:
            os._exit(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.execvp(command[0], command)
    except OSError as exc:
        os.write(2, f"jdist launch: {command[0]}: {exc.strerror}\n".encode(errors="replace"))
        os._exit(127 if isinstance(exc, FileNotFoundError) else 126)
    finally:
        os._exit(1)


def _wake_on_signals() -> int:
    """Opens a file descriptor that can be read after SIGCHLD; the guard survives signals meant for the process."""
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for number in _ENDING:
        signal.signal(number, lambda number, frame: _direct.update({number: time.monotonic()}))
    return woken


def _pass_on(pid: int, number: int) -> None:
    # A scheduler that ends a job signals every process of it: this one has the signal already, and
    # would take a second one as the wish to leave at once, without saving.
    if time.monotonic() - _direct.get(number, -JUST_NOW_S) >= JUST_NOW_S:
        os.kill(pid, number)  # it is ours and not reaped, so the number cannot be another's


def _reap(pid: int) -> int | None:
    """Reaps ended children; returns the exit code of `pid` if it was one, minus the signal's number if killed."""
    returned = None
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return returned
        if ended == 0:
            return returned
        if ended == pid:
            returned = os.waitstatus_to_exitcode(status)


def _sweep(pid: int, woken: int) -> None:
    """Kills what is left until nothing is, or it cannot be killed."""
    deadline = time.monotonic() + SWEEP_S
    _kill(os.killpg, pid)
    while time.monotonic() < deadline:
        for descendant in _descendants():
            _kill(os.kill, descendant)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if select.select([woken], [], [], 0.02)[0]:
            os.read(woken, 4096)


def _kill(kill: Callable[[int, int], None], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or another user's by now
        kill(number, signal.SIGKILL)


def _descendants() -> set[int]:
    """Finds all processes below the guard, by /proc where there is one."""
    parents = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue  # it has just ended
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family - {os.getpid()}


def _send(line: str) -> None:
    with contextlib.suppress(OSError):  # the launcher is gone, as end of file tells, too
        os.write(0, line.encode())


def _read() -> bytes:
    try:
        return os.read(0, 64)
    except OSError:
        return b""


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
