"""Readers of a feed's source: of global batches, from which a process keeps its rows, or of its own rows alone."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from typing import Any

import jax
import numpy as np

from jdist.data.batch_axis import Take, taker
from jdist.data.batching import Shapes, padded_rows
from jdist.data.leaves import count_rows
from jdist.data.lockstep import Channel, LocalBatches, Peers, batches_in_step, parts_in_step
from jdist.data.options import FeedOptions
from jdist.data.position import (
    LocalRows,
    Part,
    Place,
    ProcessShard,
    read_place,
    read_state,
    write_place,
    write_state,
)
from jdist.data.prefetch import StopRequest, ordered_map
from jdist.data.sources.protocol import (
    JointSource,
    RandomAccessSource,
    Resumable,
    kind_of,
    refuse_a_row,
    steps_from,
)
from jdist.data.sources.rows import RowsByNumber
from jdist.data.sources.sequential import IterableSource, SequentialSource, resumable
from jdist.errors import BatchError
from jdist.typing import PyTree

Source = RandomAccessSource | SequentialSource


class GlobalReader:
    """A reader of global batches, one in every process; keeps this process's rows of each."""

    num_sources, number = 1, 0  # all processes have the same source

    def __init__(self, source: Source, options: FeedOptions):
        self.source = source
        self.numbered: Resumable | None = source if isinstance(source, RandomAccessSource) else None
        self.shapes = Shapes(options.shapes)
        self.state_at_end: Any = None  # with which the next pass begins
        self._options = options
        self._take = taker(options.batch_axis)
        self._passes = itertools.count()
        self._full: int | None = None  # rows of a full batch, as a saved place knows it

    @property
    def is_resumable(self) -> bool:
        """Returns whether places in the source can be saved."""
        return self.numbered is not None or not self._sequential.advice

    @property
    def num_steps(self) -> int | None:
        """Batches of one pass; None: without end, or not known."""
        return self.numbered.num_steps if self.numbered is not None else self._sequential.num_steps

    @property
    def is_endless(self) -> bool:
        """Returns whether it is known that a pass does not end."""
        return self.num_steps is None if self.numbered is not None else self._sequential.is_endless

    @property
    def is_stream(self) -> bool:
        """Returns whether the source cannot begin again."""
        return self.numbered is None and self._sequential.is_stream

    @property
    def full(self) -> tuple[int, ...] | None:
        """Rows of a full batch by process; None: known from the first batch on."""
        rows = _full_rows(self.source) or self._full
        return None if rows is None else self._options.share.sizes(rows, self._padded(rows))

    def peek(self) -> Iterator[Part | None]:
        """Reads parts of a random-access source from the beginning, without asking other processes."""
        return self._by_number(0, workers=1)

    def parts(self, start: Place, stop: StopRequest, *, ahead: bool = True) -> Iterator[Part | None]:
        """Reads this process's parts of the batches from a place, with the place behind each."""
        # None is yielded where `stop` ends a wait for the other processes. A plain iterable starts
        # at 0. With `ahead`, the source's threads may read batches before the consumer asks for
        # them.
        if self.numbered is not None:  # the same on all processes
            return self._by_number(start.step, workers=getattr(self.source, "workers", 1) if ahead else 1)
        self._full = start.full or self._full
        batches = self._pass(start)
        if self._options.peers is None:
            return self._parts(batches)
        channel = Channel(self._options.peers, f"pass {next(self._passes)}", stop)
        return self._parts(channel.over(batches_in_step(batches, channel)))

    def write(self, place: Place, full: tuple[int, ...] | None) -> dict[str, Any]:
        """Writes a place as a dict for JSON; `full` are the rows of a full batch by process, if they are known."""
        shapes = {"shapes": self.shapes.known} if self.shapes.known else {}
        if self.numbered is not None:
            return shapes | write_state(self.numbered, place.step)
        resumable(self.source)
        if full is not None:
            place = place._replace(full=self._full_of_source(full))
        return shapes | write_place(self._sequential, place, self._gather)

    def read(self, saved: Any) -> Place:
        """Reads a place that `write` wrote; refuses that of another source."""
        if self.numbered is not None:
            place = Place(read_state(self.numbered, saved))
        else:
            resumable(self.source)
            place = read_place(self._sequential, saved, index=self.number, count=self.num_sources)
        self.shapes.known = [(shape, rows) for shape, rows in saved.get("shapes", ())]
        return place

    @property
    def _sequential(self) -> SequentialSource:
        assert isinstance(self.source, SequentialSource), "the other kind of source"
        return self.source

    def _gather(self, value: Any) -> list[Any]:
        """Gathers a value of each source."""
        return [value]

    def _full_of_source(self, full: tuple[int, ...]) -> int:
        return sum(full)

    def _pass(self, start: Place) -> Iterator[tuple[Place, PyTree]]:
        self.state_at_end = yield from _read(self.source, start, self._take)

    def _by_number(self, start: int, *, workers: int) -> Iterator[Part]:
        source, share = self.source, self._options.share
        assert isinstance(source, RandomAccessSource), "asked of those only"
        if self.shapes.limit > 1:
            batches = ordered_map(source.batch_at, lambda: steps_from(source, start), workers=workers)
            return (self._part(Place(i), self._take(batch)) for i, batch in enumerate(batches, start + 1))
        rows = self._padded(int(source.global_batch))

        def read(number: int) -> Part:
            return Place(number + 1), read_part(source, number, share, rows, self._take)

        return ordered_map(read, lambda: steps_from(source, start), workers=workers)

    def _parts(self, batches: Iterator[tuple[Place, PyTree] | None]) -> Iterator[Part | None]:
        for each in batches:
            yield None if each is None else self._part(*each)

    def _part(self, place: Place, batch: PyTree) -> Part:
        """Takes this process's part of a batch, which is filled up to the rows of the first or, of several, of its shape."""
        share = self._options.share
        if self.shapes.limit == 1:
            self._full = _full_rows(self.source) or self._full or count_rows(batch)
            return place, part_of(batch, share, self._padded(self._full))
        full = self.shapes.rows_of(batch, place.step - 1)
        padded = self._padded(full)
        return place, part_of(batch, share, padded)._replace(full=share.sizes(full, padded))

    def _padded(self, full: int) -> int:
        return padded_rows((full,), num_replicas=self._options.num_replicas)


class LocalReader(GlobalReader):
    """A reader of this process's own rows; the processes agree on the batch of each step."""

    def __init__(self, source: Source, options: FeedOptions, peers: Peers, descriptions: list[dict[str, Any]]):
        super().__init__(source, options)
        self._peers, self._gathered, self._joint = peers, itertools.count(), None
        self.number, self.num_sources = peers.share.index, peers.share.count
        if self.numbered is not None:
            # What `feed` has described of the sources of all processes.
            self._joint = tuple(each["full"] for each in descriptions)
            steps = [each["steps"] for each in descriptions]
            parts = [f"processes={len(descriptions)}"]
            for i, each in enumerate(descriptions):
                parts += [f"process_{i}.{part}" for part in each["fingerprint"].split()]
            self.numbered = JointSource(
                num_steps=None if None in steps else max(steps),
                global_batch=sum(self._joint),
                fingerprint=" ".join(parts),
            )

    @property
    def num_steps(self) -> int | None:
        """See `GlobalReader.num_steps`; when the others end is not known."""
        return None if self.numbered is None else self.numbered.num_steps

    @property
    def full(self) -> tuple[int, ...] | None:
        """See `GlobalReader.full`."""
        return self._joint

    def peek(self) -> Iterator[Part | None]:
        """See `GlobalReader.peek`."""
        for place, batch in self._pass(Place()):
            yield place, LocalRows(batch, (count_rows(batch),), self.full or ())

    def parts(self, start: Place, stop: StopRequest, *, ahead: bool = True) -> Iterator[Part | None]:
        """See `GlobalReader.parts`; all processes ask for the same, in the same order."""
        batches = self._pass(start)
        if start.step == 0:  # leaves out the batches before the first one with rows
            batches = itertools.dropwhile(lambda each: count_rows(each[1]) == 0, batches)
        local = LocalBatches(
            batches,
            start,
            full=lambda: _full_rows(self.source) or start.full,
            last=self._last,
            state_at_end=lambda: self.state_at_end,
        )
        channel = Channel(self._peers, f"pass {next(self._passes)}", stop)
        return channel.over(parts_in_step(local, channel))

    def _gather(self, value: Any) -> list[Any]:
        channel = Channel(self._peers, f"position {next(self._gathered)}", StopRequest())
        try:
            values = channel.exchange("", {"is": value}, None, "saving the position in the data")
        finally:
            channel.leave()
        assert values is not None, "nobody can ask this wait to stop"
        return [each["is"] for each in values]

    def _full_of_source(self, full: tuple[int, ...]) -> int:
        return full[self.number]

    def _last(self) -> PyTree | None:
        """Reads a batch to fill up with where the source ended before the first step."""
        source = self.source
        if isinstance(source, RandomAccessSource):
            return None if source.num_steps is None else self._take(source.batch_at(source.num_steps - 1))
        # Resumed when it had ended, so any row fills up.
        batch = next(iter(source), None) if not source.advice else None
        return None if batch is None else self._take(batch)


def _read(source: Source, start: Place, take: Any) -> Generator[tuple[Place, PyTree], None, Any]:
    """Reads the batches of a pass from a place on, each with the place behind it; returns the state at the end."""
    if start.ended:
        return start.state
    number, kind = start.step, kind_of(source)
    library = getattr(source, "kind", None) if not isinstance(source, IterableSource) else None
    batches = None
    while True:
        try:
            if batches is None:
                batches = _opened(source, start)
            batch, state = next(batches)
        except StopIteration as end:
            return end.value
        except Exception as error:
            if isinstance(source, SequentialSource):
                # Before it was opened the state was refused.
                rows = None if batches is None else source.describe_batch(number, error)
                if rows is not None:
                    error.add_note(f"while reading {rows}")
                if library is not None:
                    error.add_note(f"while making batch {number:,} (from 0) of a {kind}")
            raise
        if number == start.step and library is not None:
            refuse_a_row(batch, library)
        try:
            batch = take(batch)
        except BatchError as error:
            error.add_note(f"while making batch {number:,} (from 0) of a {kind}")
            raise
        number += 1
        yield start._replace(step=number, state=state), batch
        del batch


def _full_rows(source: Source) -> int | None:
    """Counts the rows of a full batch, if the source knows; some do from their first batch on."""
    return source.full_batch if isinstance(source, SequentialSource) else int(source.global_batch)


def _opened(source: Source, start: Place) -> Iterator[tuple[PyTree, Any]]:
    if isinstance(source, SequentialSource):
        return source.open(start.epoch, start.state)
    return ((source.batch_at(number), None) for number in steps_from(source, start.step))


def part_of(batch: PyTree, share: ProcessShard, rows: int) -> LocalRows:
    """Takes this process's part of a global batch of numpy arrays that is padded to `rows` over all processes."""
    num_rows = count_rows(batch)
    if share.count == 1:
        return LocalRows(batch, (num_rows,))
    sizes = share.sizes(num_rows, rows)
    if num_rows == 0:
        return LocalRows(batch, sizes)
    selected = _select(num_rows, share, rows)
    return LocalRows(jax.tree.map(lambda leaf: leaf[selected], batch), sizes)


def read_part(source: RandomAccessSource, step: int, share: ProcessShard, rows: int, take: Take) -> LocalRows:
    """Reads this process's part of batch number `step`, and of arrays and rows nothing else; see `part_of`."""
    if share.count == 1 or not isinstance(source, RowsByNumber):
        batch = source.batch_at(step)
        try:
            return part_of(take(batch), share, rows)
        except BatchError as error:
            error.add_note(f"in batch {step:,} (from 0) of a {kind_of(source)}")
            raise
    num_rows = source.rows_of(step)
    return LocalRows(source.batch_at(step, _select(num_rows, share, rows)), share.sizes(num_rows, rows))


def _select(num_rows: int, share: ProcessShard, rows: int) -> slice | np.ndarray:
    """Selects this process's rows of a batch, and the rows that fill its part up."""
    # These are the rows that one process would put there: the batch's own, then again from its
    # first row.
    each = rows // share.count
    start, stop = share.index * each, (share.index + 1) * each
    if stop <= num_rows:
        return slice(start, stop)
    return np.arange(start, stop) % num_rows
