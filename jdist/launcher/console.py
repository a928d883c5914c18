"""`Console`: writes the launcher's output by a thread, as a terminal that stands still must not hold it up."""

from __future__ import annotations

import collections
import io
import threading
from typing import IO

FULL = 4 << 20  # bytes that wait to be written, at which reading should pause


class Console:
    """Standard output and error, in whole lines and in order."""

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

    rich = RichConsole(file=file)  # heeds what the terminal can, and NO_COLOR
    with rich.capture() as captured:
        rich.print(Text(text, style=colour), end="")
    return captured.get().encode()
