"""Iterators that run ahead of their consumer, in threads that end with the consumer; and a pass over a dataset."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from jdist.cluster.watch.stacks import awaiting
from jdist.data.position import Numbered, Place
from jdist.errors import DatasetError
from jdist.support.tracebacks import hide_own_frames
from jdist.typing import PyTree

S = TypeVar("S")
T = TypeVar("T")
THREAD_NAME = "jdist-prefetch"
CLOSE_TIMEOUT_S = 2.0
# Every change wakes the waiting side at once. Waits end by themselves too: the garbage collector
# may not wait for the lock, and then cannot wake anyone.
_RECHECK_S = 0.2


class StopRequest:
    """A request to stop making items; a plain attribute, so that the garbage collector may set it."""

    asked = False


class Prefetcher(Iterator[T]):
    """An iterator that a background thread runs, at most `depth` items ahead of the consumer."""

    # The thread holds the iterator and this object, never the consumer, which arranges that `close`
    # or `abandon` is called when it goes away. Only the thread calls `items`; None items are
    # dropped. With `keep_unused`, items that were not taken stay for the consumer that calls
    # `resume`. `stop` asks the iterator to stop waiting, which it answers by None. Each `resume`
    # begins a turn: a consumer of an earlier one takes nothing more, and stops nobody.

    def __init__(
        self, items: Iterator[T | None], *, depth: int, keep_unused: bool = False, stop: StopRequest | None = None
    ):
        self._items = items
        self._depth = depth
        self._keep_unused = keep_unused
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._stop = stop or StopRequest()
        self._ended = False
        self._error: BaseException | None = None
        self.turn, self._stopped_turn = 0, -1
        self._thread: threading.Thread | None = None  # None: it has seen that it is to stop
        _running.add(self)
        self.resume()

    def resume(self) -> None:
        """Goes on where `close` or `abandon` stopped, with the thread that still works on an item or a new one."""
        with self._changed:
            self.turn += 1
            self._stop.asked = False
            if not self._ended and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._run, daemon=True, name=THREAD_NAME)
                self._thread.start()

    @property
    def ended(self) -> bool:
        """Returns whether nothing is left."""
        return self._ended and not self._ready and self._error is None

    @property
    def _stopped(self) -> bool:
        return self._stopped_turn == self.turn

    def __next__(self) -> T:
        return self.take(self.turn)

    def take(self, turn: int) -> T:
        """Waits for the next item; raises the iterator's own exception, or StopIteration once the turn is over."""
        with self._changed:
            if not (self._ready or self._ended or self._is_over(turn)):
                with awaiting(self._thread and self._thread.ident):
                    self._wait(turn)
            if self._ready and not self._is_over(turn):
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
            error = None
            if not self._is_over(turn):
                error, self._error = self._error, None
        if error is None:
            raise StopIteration
        try:
            raise error
        finally:
            del error  # as above

    def _is_over(self, turn: int) -> bool:
        return self._stopped or turn != self.turn

    def _wait(self, turn: int) -> None:
        while not (self._ready or self._ended or self._is_over(turn)):
            if self._thread is None or not self._thread.is_alive():
                raise DatasetError(
                    "the prefetch thread is gone without having ended, as happens in a forked process; "
                    "iterate over the dataset again in this process, or use prefetch=0"
                )
            self._changed.wait(_RECHECK_S)

    def abandon(self, turn: int) -> None:
        """Stops the thread in a turn, without waiting for anything, so that the garbage collector may call it."""
        self._stopped_turn = turn
        if not self._stopped:
            return
        self._stop.asked = True
        if not self._keep_unused:
            self._ready.clear()
        if self._changed.acquire(blocking=False):
            self._changed.notify_all()
            self._changed.release()

    def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Stops the thread and waits at most `timeout_s` for its end, which an iterator that blocks puts off."""
        with self._changed:
            self._stopped_turn, self._stop.asked = self.turn, True
            if not self._keep_unused:
                self._ready.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while self._has_room():
                item = next(self._items)
                if item is not None:
                    self._offer(item)
        except StopIteration:
            self._end(None)
        except BaseException as error:  # noqa: BLE001 - raised again where the consumer is
            self._end(error)
        if not self._keep_unused:  # nobody goes on with them: what they hold ends with the thread
            self._items = iter(())

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._ended = True
            self._error = error
            self._changed.notify_all()

    def _has_room(self) -> bool:
        with self._changed:
            while not self._stopped and len(self._ready) >= self._depth:
                self._changed.wait(_RECHECK_S)
            if self._stopped:
                self._thread = None
            return not self._stopped

    def _offer(self, item: T) -> None:
        with self._changed:
            if self._keep_unused or not self._stopped:
                self._ready.append(item)
                self._changed.notify_all()


def ordered_map(
    function: Callable[[S], T], items: Callable[[], Iterator[S]], *, workers: int, ahead: int = 1
) -> Iterator[T]:
    """Maps a function over items by several threads; yields the results in the items' order.

    Example:
        >>> from jdist.data.prefetch import ordered_map
        >>> list(ordered_map(lambda n: n * n, lambda: iter(range(5)), workers=2))
        [0, 1, 4, 9, 16]
    """
    # Thread k takes items k, k + workers, and so on, so an exception comes at its item's place.
    # Waits (for a disk, a network, a decoder in C) overlap; Python itself runs in one thread at a
    # time. `function` may not return None. Each thread counts its own iterator of `items` through;
    # `ahead` results of a thread may wait for the consumer. One worker is the consumer's own
    # thread.

    def results(number: int) -> Iterator[T]:
        # No `map`: a StopIteration of the function would end it, and what follows were lost in silence.
        for item in itertools.islice(items(), number, None, workers):
            yield function(item)

    if workers == 1:
        yield from results(0)
        return
    threads = [Prefetcher(results(number), depth=ahead) for number in range(workers)]
    try:
        # The first thread without a result has come to the end of all items: those behind it have fewer.
        with contextlib.suppress(StopIteration):
            for thread in itertools.cycle(threads):
                item = next(thread)
                yield item
                del item  # else it stays in memory while the next one is waited for
    finally:
        for thread in threads:
            thread.abandon(thread.turn)


class DatasetIterator(Iterator[PyTree]):
    """One pass over a `DistributedDataset`; its prefetch thread ends with it."""

    def __init__(
        self,
        batches: Iterator[Numbered],  # prepared, with the place behind each
        *,
        hand_over: Callable[[PyTree], PyTree] | None,  # maps each batch when the consumer takes it
        handed: Callable[[Place], None],  # gets the place behind each batch that the consumer receives
        came_to_end: Callable[[int], None],  # gets the number of batches handed out, at the end
        close: Callable[[], None],  # called by `close` while the pass is running
    ):
        self._batches = batches
        self._hand_over = hand_over
        self._handed = handed
        self._came_to_end = came_to_end
        self._close = close
        self._count = 0
        self._done = False
        self._reason: str | None = None
        self._finalizer: weakref.finalize | None = None
        if isinstance(batches, Prefetcher):
            # At exit `_close_all` closes what still runs.
            self._turn = batches.turn
            self._finalizer = weakref.finalize(self, batches.abandon, self._turn)
            self._finalizer.atexit = False

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            from jdist.support.tensorflow_names import unknown

            raise unknown("the iterator of a distributed dataset", name, dir(type(self)))

    def __next__(self) -> PyTree:
        if self._reason is not None:
            raise DatasetError(
                f"this iteration is over: {self._reason}. A dataset has one position, so one loop at a time; "
                "for a second loop at the same time call `distribute_dataset` again"
            )
        if self._done:
            raise StopIteration
        try:
            batches = self._batches
            place, batch = batches.take(self._turn) if isinstance(batches, Prefetcher) else next(batches)
            if self._hand_over is not None:
                batch = self._hand_over(batch)
        except StopIteration:
            if not self._done:  # else another thread has closed this pass meanwhile
                self._done = True
                self._came_to_end(self._count)
            raise
        except BaseException as exc:
            # An interrupt too: `iter` goes on behind the batch that was handed out last.
            self._done = True
            if isinstance(self._batches, Prefetcher):
                self._batches.abandon(self._turn)
            if isinstance(exc, Exception):
                hide_own_frames(exc)
            raise
        self._count += 1
        self._handed(place)
        return batch

    def close(self) -> None:
        """Ends the pass; waits at most 2 s for its thread. The dataset's position stays."""
        if not self._done:
            self._close()

    def end(self, reason: str | None) -> None:
        """Ends the pass without touching its thread; a `reason` is raised to whoever goes on with it."""
        if self._finalizer is not None:
            self._finalizer.detach()  # of an iterator, the next pass has the same thread
        if not self._done:
            self._done, self._reason = True, reason


_running: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A daemon thread inside XLA when the interpreter is torn down can crash it.
    for prefetcher in list(_running):
        prefetcher.close()
