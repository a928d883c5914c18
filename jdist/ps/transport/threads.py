"""Threads for work in addition to the program's own; they do not keep it from ending.

Those of `concurrent.futures` are joined when the main thread ends, and take no work from then on, while threads of other
kinds go on a little: until the functions of `atexit` have run. Interrupts (Ctrl-C) can wait for what must be done whole.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

A = TypeVar("A")
T = TypeVar("T")
_Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Threads:
    """A pool of threads that do their work in order; started with its first work."""

    def __init__(self, count: int, name: str):
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._lock, self._is_closed = threading.Lock(), False
        self._threads = [
            threading.Thread(target=_carry_out, args=(self._work,), name=f"{name}-{n}", daemon=True)
            for n in range(count)
        ]

    def submit(self, run: Callable[..., T], *args: Any) -> Future[T]:
        """Has `run(*args)` called; after the end it counts as cancelled."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                future.cancel()
                return future
            if self._threads[0].ident is None:
                for thread in self._threads:
                    thread.start()
            self._work.put((future, run, args))
        return future

    def close(self) -> None:
        """Begins nothing new, and cancels what has not been begun; what is under way goes on."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            with contextlib.suppress(queue.Empty):  # nobody adds to it any more
                while (work := self._work.get_nowait()) is not None:
                    work[0].cancel()
            for _ in self._threads:
                self._work.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits for the end of each thread, after `close`."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout_s)


def at_once(name: str, run: Callable[[A], T], items: Sequence[A]) -> list[T]:
    """Calls `run(item)` for all items at the same time, in 32 threads at most; returns the results in their order."""
    threads = Threads(min(32, max(1, len(items))), name)
    try:
        try:
            futures = [threads.submit(run, item) for item in items]
        except RuntimeError:  # from Python 3.12 on no thread starts after the main thread's end
            return [run(item) for item in items]
        return [future.result() for future in futures]
    finally:
        threads.close()


def _carry_out(queued: queue.SimpleQueue[_Work | None]) -> None:
    while (work := queued.get()) is not None:
        future, run, args = work
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(run(*args))
            except BaseException as exc:  # noqa: BLE001  # raised where the result is asked for
                future.set_exception(exc)
        del work, future, run, args  # nothing is held while it waits


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
