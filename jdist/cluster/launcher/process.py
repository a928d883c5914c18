"""One launched process: its guard, its output, its log."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from jdist.cluster.launcher.console import Console
from jdist.cluster.launcher.lines import Lines
from jdist.cluster.launcher.verdict import Task

GUARD = Path(__file__).with_name("guard.py")
_CHUNK = 1 << 16
_REMEMBERED = 1 << 16  # bytes of standard error, to find a traceback in
GUARD_GONE_S = 10.0  # its socket has closed: it is about to end


class LogFile:
    """What a process printed, as it came; if it cannot be written, that is said once and the process goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: OSError | None = None
        self._file: IO[bytes] | None = None

    def write(self, data: bytes) -> None:
        """Append; the file is made with the first bytes, so that each process that spoke has one."""
        if self.problem is not None:
            return
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  # closed by `close`
            self._file.write(data)
        except OSError as exc:
            self.problem = exc

    def close(self) -> None:
        """Close it."""
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True)
class Stream:
    """Standard output or error of a process, and where it is shown."""

    pipe: int
    lines: Lines
    shown_at: IO[str]
    prefix: bytes
    is_error: bool


class Process:
    """A process with its guard; starts them.

    Args:
        task: its place in the job.
        command: program and arguments.
        environ: its whole environment.
        log: where its output is kept.
        prefixes: what each line begins with that is shown at standard output, and at standard error.
        console: where they are shown.

    Raises:
        OSError: the guard cannot be started.
    """

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
        self.task, self.log = task, log
        self.control, theirs = socket.socketpair()
        with theirs:
            try:
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(GUARD), *command],
                    stdin=theirs.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=dict(environ),
                    start_new_session=True,
                )
            except BaseException:
                self.control.close()
                raise
        assert self._guard.stdout is not None
        assert self._guard.stderr is not None
        self.streams = [
            Stream(self._guard.stdout.fileno(), Lines(), sys.stdout, prefixes[0], is_error=False),
            Stream(self._guard.stderr.fileno(), Lines(), sys.stderr, prefixes[1], is_error=True),
        ]
        for stream in self.streams:
            os.set_blocking(stream.pipe, False)
        self.control.setblocking(False)
        self._console = console
        self._told = b""
        self._stderr = b""

    def send(self, number: signal.Signals) -> None:
        """Have the guard send a signal to the process."""
        with contextlib.suppress(OSError):  # it is gone; its end will be read
            self.control.send(bytes([number]))

    def listen(self) -> bool:
        """Read what the guard says.

        Returns:
            Whether it is gone, and with it all that was started.
        """
        try:
            said = self.control.recv(4096)
        except BlockingIOError:
            return False
        except OSError:
            said = b""
        self._told += said
        return not said

    def read(self, stream: Stream, now: float) -> bool:
        """Read a piece of output, log and show it.

        Returns:
            Whether there may be more.
        """
        try:
            data = os.read(stream.pipe, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._take(stream, *stream.lines.feed(data, now))
        return bool(data)

    def finish(self, now: float) -> tuple[int, float]:
        """After `listen` said so: read what is left of its output, and let go of it.

        Returns:
            Its exit code, minus the signal's number if it was killed, and when it ended.
        """
        try:
            returned = self._guard.wait(GUARD_GONE_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            returned = self._guard.wait()
        for stream in self.streams:
            while self.read(stream, now):
                pass
            self._take(stream, *stream.lines.close())
        self.close()
        lines = self._told.decode().splitlines()
        if len(lines) == 2:
            code, at = lines[1].split()
            return int(code), min(float(at), now)
        if lines:  # the guard was killed, and the kernel then kills the process; here what it had started
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(int(lines[0]), signal.SIGKILL)
        return returned or 1, now

    def abandon(self) -> None:
        """Leave it to its guard, which kills all as soon as the socket is closed; waits for that a bounded time."""
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(GUARD_GONE_S)
        self.close()

    def close(self) -> None:
        """Close its pipes and its log."""
        self.control.close()
        for pipe in (self._guard.stdout, self._guard.stderr):
            if pipe is not None:
                pipe.close()
        self.log.close()

    @property
    def stderr(self) -> str:
        """The last of what it said on standard error."""
        return self._stderr.decode(errors="replace")

    def _take(self, stream: Stream, whole: bytes, shown: bytes) -> None:
        if whole:
            self.log.write(whole)
            if stream.is_error:
                self._stderr = (self._stderr + whole)[-_REMEMBERED:]
        if shown:
            lines = stream.prefix + shown[:-1].replace(b"\n", b"\n" + stream.prefix) + b"\n"
            self._console.write(stream.shown_at, lines)
