"""The output of a launched process: its lines on the terminal, its log, and the end of its standard error."""

from __future__ import annotations

import abc
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from jdist.launcher.console import Console
from jdist.launcher.exit_cause import Task

_CHUNK = 1 << 16
_REMEMBERED = 1 << 16  # bytes of standard error that are kept, to find a traceback in
LONGEST_LINE = 64 * 1024  # a longer line is passed on in pieces
PROGRESS_EVERY_S = 5.0


class LogFile:
    """The log of a process's output; a failure to write it is kept in `problem`, and the process goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: OSError | None = None
        self._file: IO[bytes] | None = None

    def write(self, data: bytes) -> None:
        """Appends to the file, which the first bytes create."""
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
        if self._file is not None:
            self._file.close()


class Lines:
    """Cuts one stream of a process into lines."""

    # A part that ends with a lone carriage return is progress, which a terminal overwrites: the
    # newest is shown every few seconds, while the log holds all.

    def __init__(self) -> None:
        self._rest = b""
        self._shown_at = float("-inf")

    def feed(self, data: bytes, now: float) -> tuple[bytes, bytes]:
        """Takes in bytes; returns complete lines for the log, and lines to show."""
        whole = self._rest + data
        # A carriage return at the very end may be the first half of an end of line.
        end = max(whole.rfind(b"\n"), whole.rfind(b"\r", 0, len(whole) - 1)) + 1
        self._rest = whole[end:]
        whole = whole[:end]
        shown = self._show(whole, now)
        if len(self._rest) > LONGEST_LINE:
            whole, shown = whole + self._rest, shown + self._rest.rstrip(b"\r") + b"\n"
            self._rest = b""
        return whole, shown

    def close(self) -> tuple[bytes, bytes]:
        """Returns the last line if it has no end, in the same two forms."""
        rest, self._rest = self._rest, b""
        shown = _overwritten(rest)
        return rest, shown + b"\n" if shown else b""

    def _show(self, whole: bytes, now: float) -> bytes:
        if b"\r" not in whole:
            return whole
        lines, newline, progress = whole.replace(b"\r\n", b"\n").rpartition(b"\n")
        shown = b"".join(_overwritten(line) + b"\n" for line in lines.split(b"\n")) if newline else b""
        newest = _overwritten(progress)
        if newest and now - self._shown_at >= PROGRESS_EVERY_S:
            self._shown_at = now
            shown += newest + b"\n"
        return shown


@dataclass(frozen=True)
class Stream:
    """A process's standard output or error, and where it is shown."""

    pipe: int
    lines: Lines
    shown_at: IO[str]
    prefix: bytes
    is_error: bool


class Controlled(abc.ABC):
    """A process that the launcher controls: its output is logged, and shown with `prefixes`."""

    # Subclasses know its place. The process is gone once `control`, the launcher's end of a socket,
    # is at its end. `pipes` and `prefixes` are for standard output and standard error.

    def __init__(
        self,
        task: Task,
        control: socket.socket,
        pipes: Sequence[int],
        *,
        log: LogFile,
        prefixes: tuple[bytes, bytes],
        console: Console,
    ) -> None:
        self.task, self.control, self.log = task, control, log
        out, err = pipes
        out_prefix, error_prefix = prefixes
        self.streams = [
            Stream(out, Lines(), sys.stdout, out_prefix, is_error=False),
            Stream(err, Lines(), sys.stderr, error_prefix, is_error=True),
        ]
        for stream in self.streams:
            os.set_blocking(stream.pipe, False)
        self.control.setblocking(False)
        self._console = console
        self._stderr = b""

    @abc.abstractmethod
    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process."""

    @abc.abstractmethod
    def listen(self) -> bool:
        """Reads from `control`; returns whether the process is gone, and all that was started with it."""

    @abc.abstractmethod
    def finish(self, now: float) -> tuple[int, float]:
        """Reads the rest of a gone process's output and closes all; returns `(exit code, end)`."""
        # The exit code is minus the signal's number if the process was killed.

    @abc.abstractmethod
    def abandon(self) -> None:
        """Kills the process and all that it started; waits for that a limited time."""

    def read(self, stream: Stream, now: float) -> bool:
        """Reads, logs and shows a piece of output; returns whether there may be more."""
        try:
            data = os.read(stream.pipe, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._take(stream, *stream.lines.feed(data, now))
        return bool(data)

    def read_rest(self, now: float) -> None:
        """Reads what is left of the output."""
        for stream in self.streams:
            while self.read(stream, now):
                pass
            self._take(stream, *stream.lines.close())

    @property
    def stderr(self) -> str:
        """The end of its standard error."""
        return self._stderr.decode(errors="replace")

    def _take(self, stream: Stream, whole: bytes, shown: bytes) -> None:
        if whole:
            self.log.write(whole)
            if stream.is_error:
                self._stderr = (self._stderr + whole)[-_REMEMBERED:]
        if shown:
            lines = stream.prefix + shown[:-1].replace(b"\n", b"\n" + stream.prefix) + b"\n"
            self._console.write(stream.shown_at, lines)


def _overwritten(line: bytes) -> bytes:
    """Finds the part of a line that stays visible, as each part overwrites the one before."""
    return next((part for part in reversed(line.split(b"\r")) if part.strip()), b"")
