"""An iterator that runs ahead of its consumer, in a thread that ends with the consumer."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeVar

from jdist.cluster.watch.stacks import awaiting
from jdist.errors import DatasetError

T = TypeVar("T")
THREAD_NAME = "jdist-prefetch"
CLOSE_TIMEOUT_S = 2.0
# Every change wakes the waiting side at once. Waits end by themselves too: the garbage collector
# may not wait for the lock, and then cannot wake anyone.
_RECHECK_S = 0.2


class StopRequest:
    """A request to stop making items; a plain attribute, so that the garbage collector may set it."""

    asked = False


class PushBack(Iterator[T]):
    """An iterator that takes items back, and returns them again before new ones."""

    def __init__(self, items: Iterator[T]):
        self._items = items
        self._over = False
        self._back: deque[T] = deque()
        self._error: BaseException | None = None

    def __next__(self) -> T:
        if self._back:
            return self._back.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # else this frame and the error's traceback hold each other
        try:
            return next(self._items)
        except BaseException:  # the end, or an error, which ends a generator too
            self._over = True
            raise

    @property
    def ended(self) -> bool:
        """Whether nothing is left."""
        return self._over and not self._back and self._error is None

    def push_back(self, items: Sequence[T], error: BaseException | None) -> None:
        """Takes back items in the order they came, and the error that came after them."""
        self._back.extendleft(reversed(items))
        if error is not None:
            self._error = error


class Prefetcher(Iterator[T]):
    """An iterator that a background thread runs, at most `depth` items ahead of the consumer."""

    # The thread holds the iterator and this object, never the consumer, which arranges that `close`
    # or `abandon` is called when it goes away. Only the thread calls `items`, until it has ended;
    # None items are dropped. With `keep_unused`, items that were not taken stay for `unused`.
    # `stop` asks the iterator to stop waiting, which it answers by None.

    def __init__(
        self, items: Iterator[T | None], *, depth: int, keep_unused: bool = False, stop: StopRequest | None = None
    ):
        self._depth = depth
        self._keep_unused = keep_unused
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._stop = stop or StopRequest()
        self._stopped = False
        self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(items,), daemon=True, name=THREAD_NAME)
        _running.add(self)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def __next__(self) -> T:
        """Waits for the next item; raises the iterator's own exception."""
        with self._changed:
            if not (self._ready or self._ended or self._stopped):
                with awaiting(self._thread.ident):
                    self._wait()
            if self._ready and not self._stopped:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
            error = None
            if not self._stopped:
                error, self._error = self._error, None
        if error is None:
            raise StopIteration
        try:
            raise error
        finally:
            del error  # as above

    def _wait(self) -> None:
        while not (self._ready or self._ended or self._stopped):
            if not self._thread.is_alive():
                raise DatasetError(
                    "the prefetch thread is gone without having ended, as happens in a forked process; "
                    "iterate over the dataset again in this process, or use prefetch=0"
                )
            self._changed.wait(_RECHECK_S)

    def abandon(self) -> None:
        """Stops the thread without waiting for anything, so that the garbage collector may call it."""
        self._stopped = self._stop.asked = True
        if not self._keep_unused:
            self._ready.clear()
        if self._changed.acquire(blocking=False):
            self._changed.notify_all()
            self._changed.release()

    def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Stops the thread and waits at most `timeout_s` for its end, which an iterator that blocks puts off."""
        with self._changed:
            self._stopped = self._stop.asked = True
            if not self._keep_unused:
                self._ready.clear()
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def unused(self) -> tuple[list[T], BaseException | None]:
        """Hands over the items that were not taken, and the error after them, once the thread has ended."""
        with self._changed:
            items, error = list(self._ready), self._error
            self._ready.clear()
            self._error = None
        return items, error

    def _run(self, items: Iterator[T | None]) -> None:
        try:
            while self._has_room():
                item = next(items)
                if item is not None:
                    self._offer(item)
        except StopIteration:
            self._end(None)
        except BaseException as error:  # noqa: BLE001 - raised again where the consumer is
            self._end(error)
        else:
            self._end(None)
        finally:
            # Another prefetcher of the iterator may have the old request when this one is abandoned.
            self._stop = StopRequest()

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._ended = True
            self._error = error
            self._changed.notify_all()

    def _has_room(self) -> bool:
        with self._changed:
            while not self._stopped and len(self._ready) >= self._depth:
                self._changed.wait(_RECHECK_S)
            return not self._stopped

    def _offer(self, item: T) -> None:
        with self._changed:
            if self._keep_unused or not self._stopped:
                self._ready.append(item)
                self._changed.notify_all()


_running: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A daemon thread inside XLA when the interpreter is torn down can crash it.
    for prefetcher in list(_running):
        prefetcher.close()
