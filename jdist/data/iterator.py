"""One pass over a distributed dataset."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from jdist.data.mask import hand_on_real_rows
from jdist.data.pipeline import Numbered
from jdist.data.prefetch import Prefetcher
from jdist.errors import DatasetError
from jdist.support.tracebacks import hide_own_frames

PyTree = Any


class DatasetIterator(Iterator[PyTree]):
    """One pass over a `DistributedDataset`; tells it the position with each batch that it hands out.

    Its prefetch thread ends when the pass does, is closed, or is dropped.

    Args:
        batches: prepared batches with the position after each, from a prefetch thread or made when asked for.
        hand_over: maps each batch when the consumer takes it; None: batches are handed out as they are.
        handed: called with the position after each batch that the consumer receives.
        came_to_end: called with the number of batches handed out, when there are no more.
        close: what `close` calls while the pass is under way.
    """

    def __init__(
        self,
        batches: Iterator[Numbered],
        *,
        hand_over: Callable[[PyTree], PyTree] | None = None,
        handed: Callable[[int], None],
        came_to_end: Callable[[int], None],
        close: Callable[[], None],
    ):
        self._batches = batches
        self._hand_over = hand_over
        self._handed = handed
        self._came_to_end = came_to_end
        self._close = close
        self._count = 0
        self._done = False
        self._reason: str | None = None
        if isinstance(batches, Prefetcher):
            # At exit prefetch.py itself closes what still runs.
            weakref.finalize(self, batches.abandon).atexit = False

    def __next__(self) -> PyTree:
        if self._reason is not None:
            raise DatasetError(
                f"this iteration is over: {self._reason}. A dataset has one position, so one loop at a time; "
                "for a second loop beside it call `distribute_dataset` again"
            )
        if self._done:
            raise StopIteration
        try:
            position, batch = next(self._batches)
            if self._hand_over is not None:
                made, batch = batch, self._hand_over(batch)
                hand_on_real_rows(made, batch)
        except StopIteration:
            if not self._done:  # else another thread has closed this pass meanwhile
                self._done = True
                self._came_to_end(self._count)
            raise
        except BaseException as exc:
            # An interrupt too: the position still tells which batch was handed out last; `iter` goes on
            # there.
            self._done = True
            if isinstance(self._batches, Prefetcher):
                self._batches.abandon()
            if isinstance(exc, Exception):
                hide_own_frames(exc)
            raise
        self._count += 1
        self._handed(position)
        return batch

    def close(self) -> None:
        """Ends the pass; waits at most 2 s for its thread. The dataset's position stays."""
        if not self._done:
            self._close()

    def end(self, reason: str | None) -> None:
        """Ends the pass without touching its thread; a `reason` is raised to whoever goes on with it."""
        if not self._done:
            self._done, self._reason = True, reason
