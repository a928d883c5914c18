"""Readers of a dataset's source: of global batches, from which a process keeps its rows, or of its own rows alone."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import warnings
from collections.abc import Iterator
from typing import Any

from jdist.data.batching import Shapes, padded_rows
from jdist.data.leaves import count_rows, to_numpy
from jdist.data.lockstep import Channel, LocalBatches, Peers, batches_in_step, check_alike, parts_in_step
from jdist.data.passes import Pass, Source
from jdist.data.prefetch import StopRequest
from jdist.data.process_shard import LocalRows, NumberedPart, ProcessShard, part_of, read_part
from jdist.data.sources.files import FileSource
from jdist.data.sources.protocol import (
    JointSource,
    RandomAccessSource,
    Resumable,
    fields,
    steps_from,
)
from jdist.data.sources.replica_batches import ReplicaBatches
from jdist.data.sources.rows import BatchSource
from jdist.data.sources.shards import Policy, by_file, has_files_for
from jdist.data.sources.stateful import Place, Position, StatefulSource
from jdist.data.workers import ordered_map
from jdist.errors import BatchError, DatasetError

PyTree = Any


class GlobalReader:
    """A reader of global batches, one in every process; keeps this process's rows of each."""

    def __init__(
        self,
        source: Source,
        share: ProcessShard,  # the rows of this process
        num_replicas: int,  # over all processes
        peers: Peers | None = None,  # agree on the batches of an iterable in each step
        *,
        shapes: Shapes | None = None,
    ):
        self.source = source
        self.shapes = Shapes(1) if shapes is None else shapes
        self._share = share
        self._num_replicas = num_replicas
        self._peers = peers
        self._passes = itertools.count()
        self._full: int | None = None  # rows of a full batch, as a saved place knows it
        self.state_at_end: Any = None

    @property
    def stateful(self) -> StatefulSource | None:
        """The source that has states; None: it has none."""
        return self.source if isinstance(self.source, StatefulSource) else None

    @property
    def resumable(self) -> Resumable | None:
        """The source that positions count in; None: it has no positions."""
        return self.source if isinstance(self.source, RandomAccessSource) else None

    @property
    def full(self) -> tuple[int, ...] | None:
        """Rows of a full batch by process; None: known from the first batch on."""
        rows = _full_rows(self.source) or self._full
        return None if rows is None else self._share.sizes(rows, self._padded(rows))

    def peek(self) -> Iterator[NumberedPart | None]:
        """Reads parts of a random-access source from the beginning, without asking other processes."""
        return self._by_number(0, workers=1)

    def parts(self, start: Place, stop: StopRequest, *, ahead: bool = True) -> Iterator[NumberedPart | None]:
        """Reads this process's parts of the batches from a place, with the position after each."""
        # None is yielded where `stop` ends a wait for the other processes. A plain iterable starts
        # at 0. With `ahead`, the source's threads may read batches before the consumer asks for
        # them.
        if isinstance(self.source, RandomAccessSource):  # the same on all processes
            return self._by_number(start.position.step, workers=getattr(self.source, "workers", 1) if ahead else 1)
        self._full = start.full
        opened = Pass(self.source, start)
        batches = opened.as_numpy()
        if self._peers is not None:
            channel = Channel(self._peers, f"pass {next(self._passes)}", stop)
            batches = channel.over(batches_in_step(batches, channel))
        return self._of_iterable(batches, opened, start.position.step)

    def gather(self, value: Any) -> list[Any]:
        """Gathers a value of each source; here all processes have the same one."""
        return [value]

    @property
    def own_source(self) -> tuple[int, int]:
        """The number of this process's source, and how many there are: all processes have the same one."""
        return 0, 1

    def full_of_source(self, full: tuple[int, ...]) -> int:
        """Counts the rows of the source's full batch, from those by process."""
        return sum(full)

    def _by_number(self, start: int, *, workers: int) -> Iterator[NumberedPart]:
        source, share = self.source, self._share
        assert isinstance(source, RandomAccessSource), "asked of those only"
        if self.shapes.limit > 1:
            batches = ordered_map(source.batch_at, lambda: steps_from(source, start), workers=workers)
            return (self._shaped(to_numpy(batch), Position(i)) for i, batch in enumerate(batches, start + 1))
        rows = self._padded(int(source.global_batch))
        return ordered_map(
            lambda number: (Position(number + 1), read_part(source, number, share, rows)),
            lambda: steps_from(source, start),
            workers=workers,
        )

    def _of_iterable(
        self, batches: Iterator[PyTree | None], opened: Pass, number: int
    ) -> Iterator[NumberedPart | None]:
        full = _full_rows(self.source) or self._full
        for batch in batches:
            if batch is None:
                yield None
                continue
            number += 1
            if self.shapes.limit > 1:
                yield self._shaped(batch, opened.position(number))
                continue
            full = full or count_rows(batch)
            yield opened.position(number), part_of(batch, self._share, self._padded(full))
        self.state_at_end = opened.state_at_end()

    def _shaped(self, batch: PyTree, position: Position) -> NumberedPart:
        """Takes this process's part of a batch, which is filled up to the rows of its shape."""
        full = self.shapes.rows_of(batch, position.step - 1)
        padded = self._padded(full)
        return position, part_of(batch, self._share, padded)._replace(full=self._share.sizes(full, padded))

    def _padded(self, full: int) -> int:
        return padded_rows((full,), num_replicas=self._num_replicas)


class LocalReader:
    """A reader of this process's own rows; the processes agree on the batch of each step."""

    def __init__(self, source: Source, peers: Peers, descriptions: list[dict[str, Any]]):
        self.source = source
        self._peers = peers
        self._passes, self._gathered = itertools.count(), itertools.count()
        self.resumable, self.full = None, None
        self.stateful = source if isinstance(source, StatefulSource) else None
        self.state_at_end: Any = None
        if isinstance(source, RandomAccessSource):
            # The `_describe` results of all processes.
            self.full = tuple(each["full"] for each in descriptions)
            steps = [each["steps"] for each in descriptions]
            parts = [f"processes={len(descriptions)}"]
            for i, each in enumerate(descriptions):
                parts += [f"process_{i}.{part}" for part in each["fingerprint"].split()]
            self.resumable = JointSource(
                num_steps=None if None in steps else max(steps),
                global_batch=sum(self.full),
                fingerprint=" ".join(parts),
            )

    def peek(self) -> Iterator[NumberedPart | None]:
        """See `GlobalReader.peek`."""
        assert isinstance(self.source, RandomAccessSource), "asked of those only"
        for number in steps_from(self.source, 0):
            batch = to_numpy(self.source.batch_at(number))
            yield Position(number + 1), LocalRows(batch, (count_rows(batch),), self.full or ())

    def parts(self, start: Place, stop: StopRequest, *, ahead: bool = True) -> Iterator[NumberedPart | None]:
        """See `GlobalReader.parts`; all processes ask for the same, in the same order."""
        opened = Pass(self.source, start)
        batches = opened if start.position.step else _from_first_rows(opened)
        local = LocalBatches(batches, full=lambda: _full_rows(self.source) or start.full, last=self._last)
        channel = Channel(self._peers, f"pass {next(self._passes)}", stop)
        return channel.over(self._in_step(parts_in_step(local, channel, start=start.position.step), opened))

    def gather(self, value: Any) -> list[Any]:
        """Gathers a value of each process's source; all processes have to ask."""
        channel = Channel(self._peers, f"position {next(self._gathered)}", StopRequest())
        try:
            values = channel.exchange("", {"is": value}, None, "saving the position in the data")
        finally:
            channel.leave()
        assert values is not None, "nobody can ask this wait to stop"
        return [each["is"] for each in values]

    @property
    def own_source(self) -> tuple[int, int]:
        """The number of this process's source, and how many there are."""
        return self._peers.share.index, self._peers.share.count

    def full_of_source(self, full: tuple[int, ...]) -> int:
        """See `GlobalReader.full_of_source`."""
        return full[self._peers.share.index]

    def _in_step(self, numbered: Iterator[tuple[int, LocalRows] | None], opened: Pass) -> Iterator[NumberedPart | None]:
        for part in numbered:
            yield None if part is None else (opened.position(part[0]), part[1])
        self.state_at_end = opened.state_at_end()

    def _last(self) -> PyTree | None:
        if isinstance(self.source, StatefulSource):  # resumed when it had ended, so any row fills up
            return next(iter(self.source.open(0, None)), None)
        if not isinstance(self.source, RandomAccessSource) or self.source.num_steps is None:
            return None
        return self.source.batch_at(self.source.num_steps - 1)


def _from_first_rows(batches: Iterator[PyTree]) -> Iterator[PyTree]:
    """Leaves out the batches before the first one with rows."""
    return itertools.dropwhile(lambda batch: count_rows(to_numpy(batch)) == 0, batches)


def make_reader(
    source: Source, *, share: ProcessShard, num_replicas: int, autoshard: Policy, peers: Peers | None, shapes: int = 1
) -> GlobalReader | LocalReader:
    """Makes this process's reader of a source; see `distributed_dataset` for the arguments."""
    if share.count > 1 and peers is None and autoshard in ("file", "off"):
        raise DatasetError(
            f"`autoshard` is {autoshard!r}, under which processes have to agree on each step, but the strategy does not "
            "know how to reach them. Make it with `jdist.multi_worker()`"
        )
    if share.count == 1 or peers is None:
        return GlobalReader(source, share, num_replicas, shapes=Shapes(shapes))

    def take() -> tuple[Policy, Source]:
        policy = _policy(source, share, autoshard)
        return policy, _local_files(source, share) if policy == "file" else source

    (policy, local), descriptions = peers.together("the source", take, lambda taken: _describe(source, taken[0], peers))
    check_alike(
        [each["alike"] for each in descriptions],
        "the sources of the processes",
        'Every process has to make the same; one that has a part of its own is fed by `autoshard="off"`',
    )
    if policy == "data":
        _say_what_is_read(source, share)
        return GlobalReader(source, share, num_replicas, peers, shapes=Shapes(shapes))
    if shapes > 1:
        raise DatasetError(
            f"`shapes` is {shapes}, but autoshard={policy!r} gives each process batches of its own, whose shapes may differ in "
            'one step. Let all processes make the same batches, `jdist.InputOptions(autoshard="data")`'
        )
    return LocalReader(local, peers, descriptions)


def _policy(source: Source, share: ProcessShard, autoshard: Policy) -> Policy:
    """Decides how processes share a source; refuses one that is split in another way."""
    part = getattr(source, "own_part", None)
    if part is None or part == (0, 1):
        return ("file" if has_files_for(source, share.count) else "data") if autoshard == "auto" else autoshard
    here = f"process {share.index} of {share.count}"
    if autoshard in ("file", "data"):
        raise DatasetError(
            f"`autoshard` is {autoshard!r}, by which the processes share one source, but the {source.kind} gives this process "  # type: ignore[union-attr]  # a source with `own_part` has it
            f"part {part[0]} of {part[1]} alone. Leave `autoshard` out, or let the {source.kind} give all data"  # type: ignore[union-attr]  # likewise
        )
    if autoshard == "auto" and part != (share.index, share.count):
        raise DatasetError(
            f"the {source.kind} gives part {part[0]} of {part[1]} to this process, which is {here}, so rows would be left out "  # type: ignore[union-attr]  # likewise
            'or count twice. Give it the process\'s own number, or if that is meant `InputOptions(autoshard="off")`'
        )
    return "off"


def _say_what_is_read(source: Source, share: ProcessShard) -> None:
    """Tells once that each process reads the data of all, where another library could give it its own."""
    how = getattr(source, "how_to_share", "") or None
    if isinstance(source, BatchSource):
        how = "batch it last, after all that is done to rows, and without a `batch_fn`: then a process reads its rows alone"
    elif how is not None:
        how = f"let it give each process its part, by {how}"
    if how is not None and share.index == 0:
        warnings.warn(
            f"each of the {share.count} processes reads all batches of the {source.kind}, and keeps its rows. To read less, "  # type: ignore[union-attr]  # what has one of these has a kind
            f"{how}.",
            UserWarning,
            stacklevel=2,
        )


def _local_files(source: Source, share: ProcessShard) -> FileSource:
    source = by_file(source, share.count, share.index, option="autoshard")
    below = source.global_batch // share.count * share.count
    if below != source.global_batch:
        nearest = f"{below} or {below + share.count}" if below else f"{share.count}"
        raise BatchError(
            f"a global batch of {source.global_batch} rows does not divide by {share.count} processes, of which each makes "
            f'its own rows by autoshard="file"; use a global batch of {nearest}, or autoshard="data"'
        )
    return dataclasses.replace(source, global_batch=source.global_batch // share.count)


def _describe(source: Source, autoshard: Policy, peers: Peers) -> dict[str, Any]:
    """Describes a source for the other processes: facts that must be the same on all, and those of this one."""
    random_access = isinstance(source, RandomAccessSource)
    kind = "random-access" if random_access else "one with states" if isinstance(source, StatefulSource) else "iterable"
    alike = {"the kind of source": kind, "`autoshard`": autoshard}
    if isinstance(source, FileSource) and autoshard != "off":
        names = "\n".join(os.path.basename(os.fspath(path)) for path in source.paths)
        alike["the number of files"] = f"{len(source.paths):,}"
        alike["the hash of the files' names"] = hashlib.sha256(os.fsencode(names)).hexdigest()[:16]
        alike |= fields(source.fingerprint)
    elif autoshard == "data" and isinstance(source, StatefulSource | RandomAccessSource):
        alike |= fields(source.fingerprint) | {"the fingerprint": source.fingerprint}
    description: dict[str, Any] = {"alike": peers.bounded(json.dumps(alike))}
    if random_access and autoshard == "off":
        description["full"] = int(source.global_batch)  # JSON knows no numbers of numpy
        description["steps"] = None if source.num_steps is None else int(source.num_steps)
        description["fingerprint"] = peers.bounded(source.fingerprint)
    return description


def _full_rows(source: Source) -> int | None:
    """Counts the rows of a full batch, if the source knows; some do from their first batch on."""
    rows = source.global_batch if isinstance(source, RandomAccessSource | FileSource | ReplicaBatches) else None
    return None if rows is None else int(rows)
