"""Ctrl-C and SIGTERM as a wish that a loop can ask about, between two steps."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class StopRequest:
    """Which signal asked this process to stop.

    Attributes:
        signal: SIGINT, SIGTERM, or None as long as nobody asked.
    """

    signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 plus the signal's number, as shells report it: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + int(self.signal) if self.signal is not None else 0


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catch SIGINT and SIGTERM while the block runs; the second of them ends the process at once.

    Yields:
        The request, false until a signal arrives. Outside the main thread signals are left alone.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: object) -> None:
        request.signal = signal.Signals(number)
        for each in before:
            signal.signal(each, signal.SIG_DFL)

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    for each in before:
        signal.signal(each, handle)
    try:
        yield request
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
