"""The output of launched processes: `LogFile`, the lines of a stream, and the `Console` that shows them."""

from __future__ import annotations

import collections
import io
import threading
from pathlib import Path
from typing import IO

LONGEST_LINE = 64 * 1024  # a longer line is passed on in pieces
PROGRESS_EVERY_S = 5.0
FULL = 4 << 20  # bytes that wait to be written, at which reading should pause


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


class Console:
    """Standard output and error, in whole lines and in order; a thread writes them, as a terminal may stand still."""

    def __init__(self) -> None:
        self._waiting: collections.deque[tuple[IO[str], bytes]] = collections.deque()
        self._size, self._closed = 0, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="jdist-launch-console", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        return self._size > FULL

    def write(self, file: IO[str], lines: bytes) -> None:
        """Queues lines; returns at once."""
        if lines:
            with self._changed:
                self._waiting.append((file, lines))
                self._size += len(lines)
                self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Waits until all is written, or nothing of it within `timeout_s`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        left = None
        while self._thread.is_alive() and left != self._size:
            left = self._size
            self._thread.join(timeout_s)

    def _work(self) -> None:
        broken: set[int] = set()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                file, lines = self._waiting.popleft()
            if id(file) not in broken:
                try:
                    _write(file, lines)
                except (OSError, ValueError):  # the terminal, or the reader of the pipe, is gone; the logs go on
                    broken.add(id(file))
            with self._changed:
                self._size -= len(lines)


def _write(file: IO[str], lines: bytes) -> None:
    if isinstance(file, io.TextIOWrapper):
        file.flush()
        file.buffer.write(lines)
    else:  # a notebook's
        file.write(lines.decode(errors="replace"))
    file.flush()


def prefix(label: str, file: IO[str], colour: str) -> bytes:
    """Makes the prefix of a process's lines, in colour where they go to a terminal."""
    text = f"[{label}] "
    if not file.isatty():
        return text.encode()
    from rich.console import Console as RichConsole
    from rich.text import Text

    rich = RichConsole(file=file)  # respects the terminal's abilities, and NO_COLOR
    with rich.capture() as captured:
        rich.print(Text(text, style=colour), end="")
    return captured.get().encode()


def _overwritten(line: bytes) -> bytes:
    """Finds the part of a line that stays visible, as each part overwrites the one before."""
    return next((part for part in reversed(line.split(b"\r")) if part.strip()), b"")
