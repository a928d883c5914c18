"""Interrupts (Ctrl-C, or a notebook's) that wait for the end of what must be done whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Defers an interrupt of the main thread to the end of the block, which must be short."""
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(handler):
        yield
        return
    deferred: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *arguments: deferred.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if deferred:
            handler(*deferred[0])
