"""A launched process: `Process` logs and shows its output, its transport starts, signals and ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from jdist.cluster.address import join
from jdist.launcher.environment import free_ports
from jdist.launcher.exit_cause import Task
from jdist.launcher.output import Console, Lines, LogFile

GUARD = Path(__file__).with_name("guard.py")
GUARD_GONE_S = 10.0  # for a guard to end after its socket has closed
CHUNK = 1 << 16
_REMEMBERED = 1 << 16  # bytes of standard error that are kept, to find a traceback in


class Transport(Protocol):
    """A way to a process that has been started."""

    control: socket.socket  # at its end once the process is gone, and all that it started
    pipes: Sequence[int]  # standard output and standard error

    def send(self, number: int) -> None:
        """Sends a signal to the process."""
        ...

    def is_gone(self) -> bool:
        """Reads from `control`; returns whether that is at its end."""
        ...

    def end(self) -> tuple[int, float | None]:
        """Waits for a process that is gone; returns its exit code, minus the signal's number, and its end if known."""
        ...

    def kill(self) -> None:
        """Kills the process and all that it started; waits for that a limited time."""
        ...

    def close(self) -> None:
        """Closes `control` and `pipes`."""
        ...


class GuardPipe:
    """The transport of a process on this machine: a socket to its guard."""

    # `environ` is the full environment; the process runs in `folder`, or in this process's own.
    # `output`: a file for its output, in place of pipes.

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        folder: str | None = None,
        output: IO[bytes] | None = None,
    ) -> None:
        self.control, theirs = socket.socketpair()
        with theirs:
            try:
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(GUARD), *command],
                    stdin=theirs.fileno(),
                    stdout=subprocess.PIPE if output is None else output,
                    stderr=subprocess.PIPE if output is None else subprocess.STDOUT,
                    env=dict(environ),
                    cwd=folder,
                    start_new_session=True,
                )
            except BaseException:
                self.control.close()
                raise
        self._files = [file for file in (self._guard.stdout, self._guard.stderr) if file is not None]
        self.pipes: Sequence[int] = [file.fileno() for file in self._files]
        self._heard = b""

    def send(self, number: int) -> None:
        with contextlib.suppress(OSError):  # it is gone; its end will be read
            self.control.send(bytes([number]))

    def is_gone(self) -> bool:
        try:
            data = self.control.recv(4096)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._heard += data
        return not data

    def end(self) -> tuple[int, float | None]:
        try:
            returned = self._guard.wait(GUARD_GONE_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            returned = self._guard.wait()
        lines = self._heard.decode().splitlines()
        if len(lines) == 2:
            code, at = lines[1].split()
            return int(code), float(at)
        if lines:  # the guard was killed, and then the kernel kills the process; its own children are killed here
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(int(lines[0]), signal.SIGKILL)
        return returned or 1, None

    def kill(self) -> None:
        self.control.close()  # by which the guard kills all
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(GUARD_GONE_S)

    def close(self) -> None:
        self.control.close()
        for file in self._files:
            file.close()


@dataclass(frozen=True)
class Stream:
    """A process's standard output or error, and where it is shown."""

    pipe: int
    lines: Lines
    shown_at: IO[str]
    prefix: bytes
    is_error: bool


class Process:
    """A process of a launch: its output is logged, and shown with `prefixes`."""

    # `prefixes` are for standard output and standard error.

    def __init__(
        self, task: Task, transport: Transport, *, log: LogFile, prefixes: tuple[bytes, bytes], console: Console
    ) -> None:
        self.task, self.transport, self.log, self._console = task, transport, log, console
        out, err = transport.pipes
        self.streams = [
            Stream(out, Lines(), sys.stdout, prefixes[0], is_error=False),
            Stream(err, Lines(), sys.stderr, prefixes[1], is_error=True),
        ]
        for pipe in transport.pipes:
            os.set_blocking(pipe, False)
        transport.control.setblocking(False)
        self._stderr = b""

    @property
    def stderr(self) -> str:
        """The end of its standard error."""
        return self._stderr.decode(errors="replace")

    def read(self, stream: Stream, now: float) -> bool:
        """Reads, logs and shows a piece of output; returns whether there may be more."""
        try:
            data = os.read(stream.pipe, CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._take(stream, *stream.lines.feed(data, now))
        return bool(data)

    def finish(self, now: float) -> tuple[int, float]:
        """Reads the rest of a gone process's output and closes all; returns `(exit code, end)`."""
        code, at = self.transport.end()
        for stream in self.streams:
            while self.read(stream, now):
                pass
            self._take(stream, *stream.lines.close())
        self._close()
        return code, now if at is None else min(at, now)

    def abandon(self) -> None:
        """Kills the process and all that it started; waits for that a limited time."""
        self.transport.kill()
        self._close()

    def _take(self, stream: Stream, whole: bytes, shown: bytes) -> None:
        if whole:
            self.log.write(whole)
            if stream.is_error:
                self._stderr = (self._stderr + whole)[-_REMEMBERED:]
        if shown:
            lines = stream.prefix + shown[:-1].replace(b"\n", b"\n" + stream.prefix) + b"\n"
            self._console.write(stream.shown_at, lines)

    def _close(self) -> None:
        self.transport.close()
        self.log.close()


class Host:
    """Places the processes of each attempt, and starts them: on this machine."""

    def __init__(self, address: str = "127.0.0.1"):
        self.address = address  # at which the processes are reached

    def place(self, tasks: Sequence[Task], is_asked: Callable[[], bool]) -> list[str]:
        """Finds an address for each process of an attempt, unless the user has asked to stop; the next ports are free."""
        return [join(self.address, port) for port in free_ports(len(tasks))]

    def start(self, task: Task, line: Sequence[str], environ: Mapping[str, str]) -> Transport:
        """Starts a process in its place."""
        return GuardPipe(line, environ)
