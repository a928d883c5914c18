"""A process of this machine with its guard: `Process`, and the functions that start a guard and take its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jdist.launcher.console import Console
from jdist.launcher.exit_cause import Task
from jdist.launcher.output import Controlled, LogFile

GUARD = Path(__file__).with_name("guard.py")
GUARD_GONE_S = 10.0  # for a guard to end whose socket has closed


def start_guard(
    command: Sequence[str], environ: Mapping[str, str], *, folder: str | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts a process under its guard; returns the guard, which has its output, and a socket."""
    # `environ` is the full environment; the process runs in `folder`, or in this process's own.
    control, theirs = socket.socketpair()
    with theirs:
        try:
            guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), *command],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(environ),
                cwd=folder,
                start_new_session=True,
            )
        except BaseException:
            control.close()
            raise
    return guard, control


def end_of(guard: subprocess.Popen[bytes], told: bytes) -> tuple[int, float | None]:
    """Waits for a guard whose socket is at its end; returns the process's exit code and its end."""
    # The code is minus the signal's number if it was killed; the end is None if only the guard knew
    # it. `told` is all that came from the socket.
    try:
        returned = guard.wait(GUARD_GONE_S)
    except subprocess.TimeoutExpired:
        guard.kill()
        returned = guard.wait()
    lines = told.decode().splitlines()
    if len(lines) == 2:
        code, at = lines[1].split()
        return int(code), float(at)
    if lines:  # the guard was killed, and then the kernel kills the process; its own children are killed here
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(lines[0]), signal.SIGKILL)
    return returned or 1, None


class Process(Controlled):
    """A process under its guard, whose output is logged, and shown with `prefixes`."""

    def __init__(
        self,
        task: Task,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        log: LogFile,
        prefixes: tuple[bytes, bytes],
        console: Console,
    ) -> None:
        self._guard, control = start_guard(command, environ)
        assert self._guard.stdout is not None
        assert self._guard.stderr is not None
        pipes = self._guard.stdout.fileno(), self._guard.stderr.fileno()
        super().__init__(task, control, pipes, log=log, prefixes=prefixes, console=console)
        self._from_guard = b""

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process, through its guard."""
        with contextlib.suppress(OSError):  # it is gone; its end will be read
            self.control.send(bytes([number]))

    def listen(self) -> bool:
        """Reads from the guard; returns whether it is gone, and all that was started with it."""
        try:
            data = self.control.recv(4096)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._from_guard += data
        return not data

    def finish(self, now: float) -> tuple[int, float]:
        """Reads the rest of the output and closes all, once the guard is gone."""
        code, at = end_of(self._guard, self._from_guard)
        self.read_rest(now)
        self.close()
        return code, now if at is None else min(at, now)

    def abandon(self) -> None:
        """Closes the socket, so that the guard kills all; waits for that a limited time."""
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(GUARD_GONE_S)
        self.close()

    def close(self) -> None:
        self.control.close()
        for pipe in (self._guard.stdout, self._guard.stderr):
            if pipe is not None:
                pipe.close()
        self.log.close()
