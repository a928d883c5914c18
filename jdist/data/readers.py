"""Readers of a dataset's source: of global batches, from which a process keeps its rows, or of its own rows alone."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from jdist.data.batching import padded_rows
from jdist.data.leaves import count_rows, to_numpy
from jdist.data.lockstep import Channel, LocalBatches, Peers, batches_in_step, check_alike, parts_in_step
from jdist.data.prefetch import StopRequest
from jdist.data.process_shard import LocalRows, NumberedPart, ProcessShard, part_of, read_part
from jdist.data.sources.files import FileSource
from jdist.data.sources.protocol import JointSource, RandomAccessSource, Resumable, fields, steps_from
from jdist.data.sources.replica_batches import ReplicaBatches
from jdist.data.sources.shards import Policy, by_file, has_files_for
from jdist.errors import BatchError, DatasetError

PyTree = Any
Source = Iterable[PyTree] | RandomAccessSource


class GlobalReader:
    """A reader of global batches, which every process makes; keeps this process's rows of each.

    Args:
        source: of global batches.
        share: which rows.
        num_replicas: over all processes.
        peers: the processes, which agree in each step on the batches of an iterable; None: they cannot.
    """

    def __init__(self, source: Source, share: ProcessShard, num_replicas: int, peers: Peers | None = None):
        self.source = source
        self._share = share
        self._num_replicas = num_replicas
        self._peers = peers
        self._passes = itertools.count()

    @property
    def resumable(self) -> Resumable | None:
        """The source that positions count in; None: it has no positions."""
        return self.source if isinstance(self.source, RandomAccessSource) else None

    @property
    def full(self) -> tuple[int, ...] | None:
        """Rows of a full batch by process; None: known from the first batch on."""
        rows = _full_rows(self.source)
        return None if rows is None else self._share.sizes(rows, self._padded(rows))

    def peek(self) -> Iterator[NumberedPart | None]:
        """Reads parts of a random-access source from the beginning, without asking other processes."""
        return self.parts(0, StopRequest())

    def parts(self, start: int, stop: StopRequest) -> Iterator[NumberedPart | None]:
        """Reads this process's parts of the batches from position `start` on, with the position after each.

        None is yielded where `stop` ends a wait for the other processes. An iterable starts at 0.
        """
        if isinstance(self.source, RandomAccessSource):  # the same on all processes
            source, share = self.source, self._share
            rows = self._padded(int(source.global_batch))
            return ((number + 1, read_part(source, number, share, rows)) for number in steps_from(source, start))
        batches = _numpys(self.source)
        if self._peers is not None:
            channel = Channel(self._peers, f"pass {next(self._passes)}", stop)
            batches = channel.over(batches_in_step(batches, channel))
        return self._of_iterable(batches)

    def _of_iterable(self, batches: Iterator[PyTree | None]) -> Iterator[NumberedPart | None]:
        full, number = _full_rows(self.source), 0
        for batch in batches:
            if batch is None:
                yield None
                continue
            full = full or count_rows(batch)
            number += 1
            yield number, part_of(batch, self._share, self._padded(full))

    def _padded(self, full: int) -> int:
        return padded_rows((full,), num_replicas=self._num_replicas)


class LocalReader:
    """A reader of this process's own rows; the processes agree in each step on what they have together.

    Args:
        source: of this process's rows.
        peers: the processes.
        descriptions: each process's `_describe` of its source.
    """

    def __init__(self, source: Source, peers: Peers, descriptions: list[dict[str, Any]]):
        self.source = source
        self._peers = peers
        self._passes = itertools.count()
        self.resumable, self.full = None, None
        if isinstance(source, RandomAccessSource):
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
            yield number + 1, LocalRows(batch, (count_rows(batch),), self.full or ())

    def parts(self, start: int, stop: StopRequest) -> Iterator[NumberedPart | None]:
        """See `GlobalReader.parts`; all processes ask for the same, in the same order."""
        local = LocalBatches(_batches(self.source, start), full=lambda: _full_rows(self.source), last=self._last)
        channel = Channel(self._peers, f"pass {next(self._passes)}", stop)
        return channel.over(parts_in_step(local, channel, start=start))

    def _last(self) -> PyTree | None:
        if not isinstance(self.source, RandomAccessSource) or self.source.num_steps is None:
            return None
        return self.source.batch_at(self.source.num_steps - 1)


def _numpys(source: Any) -> Iterator[PyTree]:
    """Converts the batches of an iterable, which the first `next` opens."""
    yield from map(to_numpy, source)


def _batches(source: Source, start: int) -> Iterator[PyTree]:
    """Reads the batches of a source from a position on; of an iterable from the first one with rows on."""
    if isinstance(source, RandomAccessSource):
        yield from map(source.batch_at, steps_from(source, start))
    else:
        yield from itertools.dropwhile(lambda batch: count_rows(to_numpy(batch)) == 0, source)


def make_reader(
    source: Source, *, share: ProcessShard, num_replicas: int, autoshard: Policy, peers: Peers | None
) -> GlobalReader | LocalReader:
    """Makes this process's reader of a source; see `distributed_dataset` for the arguments.

    Raises:
        DatasetError: the source cannot be shared so, or the processes have different ones.
        BatchError: the global batch does not divide by the processes.
    """
    if share.count > 1 and peers is None and autoshard in ("file", "off"):
        raise DatasetError(
            f"`autoshard` is {autoshard!r}, under which processes have to agree on each step, but the strategy does not "
            "know how to reach them. Make it with `jdist.multi_worker()`"
        )
    if share.count == 1 or peers is None:
        return GlobalReader(source, share, num_replicas)
    if autoshard == "auto":
        autoshard = "file" if has_files_for(source, share.count) else "data"
    local, descriptions = peers.together(
        "the source",
        lambda: _local_files(source, share) if autoshard == "file" else source,
        lambda _: _describe(source, autoshard, peers),
    )
    check_alike(
        [each["alike"] for each in descriptions],
        "the sources of the processes",
        'Every process has to make the same; one that has a part of its own is fed by `autoshard="off"`',
    )
    if autoshard == "data":
        return GlobalReader(source, share, num_replicas, peers)
    return LocalReader(local, peers, descriptions)


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
    alike = {"the kind of source": "random-access" if random_access else "iterable"}
    if isinstance(source, FileSource) and autoshard != "off":
        names = "\n".join(os.path.basename(os.fspath(path)) for path in source.paths)
        alike["the number of files"] = f"{len(source.paths):,}"
        alike["the hash of the files' names"] = hashlib.sha256(os.fsencode(names)).hexdigest()[:16]
    elif random_access and autoshard == "data":
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
