"""Preparation of batches for the devices, by a prefetch thread or the consumer, and one pass over them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from jdist.data.batching import (
    BatchLayout,
    fit,
    hand_on_real_rows,
    padded_rows,
    plan_layout,
    stack,
)
from jdist.data.leaves import check_fits, tree_spec
from jdist.data.options import FeedOptions
from jdist.data.position import Numbered, Part, Place
from jdist.data.prefetch import Prefetcher
from jdist.data.readers import GlobalReader
from jdist.errors import BatchError, DatasetError
from jdist.support.tracebacks import hide_own_frames
from jdist.typing import PyTree


def learn_layout(
    parts: Iterator[Part | None], reader: GlobalReader, options: FeedOptions
) -> tuple[BatchLayout, Iterator[Part | None]] | None:
    """Learns the layout from the first batch with rows; returns it with the batches from that one on, None without one."""
    for place, part in filter(None, parts):
        if (rows := sum(part.sizes)) > 0:
            # Some sources know their full batch from the first one on.
            known = part.full or reader.full
            by_process = known or options.share.sizes(rows, padded_rows((rows,), num_replicas=options.num_replicas))
            layout = plan_layout(part.batch, by_process, options, copy=not getattr(reader.source, "is_fresh", False))
            return layout, itertools.chain([(place, part)], parts)
    return None


def prepare(parts: Iterator[Part | None], layout: BatchLayout) -> Generator[Numbered | None]:
    """Fits, stacks and places batches; yields each with the place behind it."""
    # None comes where a wait for other processes was stopped; the next item continues. The
    # generator holds no reference to its consumer, so a thread that runs it does not keep the
    # consumer alive.
    options = layout.options
    group: list[PyTree] = []
    place = Place()
    # `fit` copies before the source is asked again, which may refill the same memory.
    layouts = {(layout.tree, layout.full): layout}
    for each in parts:
        if each is None:
            yield None
            continue
        place, part = each
        try:
            if options.shapes > 1:
                shape = tree_spec(part.batch), part.full
                if shape not in layouts:
                    layouts[shape] = plan_layout(part.batch, part.full, options, copy=layout.copy)
                layout = layouts[shape]
            fitted = fit(layout, part)
            check_fits(fitted)
        except BatchError as error:
            error.add_note(f"in batch {place.step - 1:,} (from 0) of the pass")
            raise
        if fitted is None:
            continue
        group.append(fitted)
        if len(group) == options.steps_per_call:
            yield place, _placed(group, options)
            group = []
    if group:
        yield place, _placed(group, options)


def _placed(group: list[PyTree], options: FeedOptions) -> PyTree:
    batch = group[0] if options.steps_per_call == 1 else stack(group)
    return put(batch, options.place) if options.place is not None and options.input.prefetch_to_device else batch


def put(batch: PyTree, place: Callable[[PyTree], PyTree]) -> PyTree:
    """Puts a batch where `place` does; its mask stays known as the one of jdist."""
    placed = place(batch)
    hand_on_real_rows(batch, placed)
    return placed


def skip_batches(parts: Iterator[Part | None], count: int, kind: str) -> Iterator[Part | None]:
    """Leaves out the first batches of a plain iterable."""
    place = Place()
    for each in parts:
        place = place if each is None else each[0]
        if each is None or place.step > count:
            yield each
    if place.step < count:
        raise DatasetError(
            f"the {kind} ended after {place.step:,} batches, but {count:,} of this pass were trained on before. To go on, "
            "it has to give the same batches in the same order as then; or begin anew, in another folder."
        )


class DatasetIterator(Iterator[PyTree]):
    """One pass over a `DistributedDataset`; its prefetch thread ends with it."""

    def __init__(
        self,
        batches: Iterator[Numbered],  # prepared, with the place behind each
        *,
        # maps each batch when the consumer takes it
        hand_over: Callable[[PyTree], PyTree] | None = None,
        # gets the place behind each batch that the consumer receives
        handed: Callable[[Place], None],
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
            # At exit prefetch.py itself closes what still runs.
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
                "for a second loop beside it call `distribute_dataset` again"
            )
        if self._done:
            raise StopIteration
        try:
            batches = self._batches
            place, batch = batches.take(self._turn) if isinstance(batches, Prefetcher) else next(batches)
            if self._hand_over is not None:
                batch = put(batch, self._hand_over)
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
