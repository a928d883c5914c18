"""The way from a source to the dataset that feeds replicas: checks, and the reader of this process."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import warnings
from collections.abc import Iterable
from typing import Any

from jdist.data.adapters.recognize import adapted
from jdist.data.batching import check_divisible
from jdist.data.dataset import DistributedDataset
from jdist.data.lockstep import Peers, check_alike
from jdist.data.options import FeedOptions, Policy
from jdist.data.position import ProcessShard
from jdist.data.readers import GlobalReader, LocalReader, Source
from jdist.data.sources.files import FileSource
from jdist.data.sources.protocol import RandomAccessSource, check_source, fields, kind_of
from jdist.data.sources.replica_batches import check_turns
from jdist.data.sources.rows import BatchSource, RowsByNumber
from jdist.data.sources.sequential import IterableSource, SequentialSource
from jdist.data.sources.shards import by_file, has_files_for
from jdist.errors import BatchError, DatasetError
from jdist.typing import PyTree


def distributed_dataset(source: Iterable[PyTree] | RandomAccessSource, options: FeedOptions) -> DistributedDataset:
    """Feeds the batches of a source to replicas; `strategy.distribute_dataset` calls this.

    Args:
        source: an iterable of numpy pytrees with leaves [rows, ...], one global batch each; or a random-access source.
        options: for how many replicas, and how.

    Raises:
        DatasetError: the source is empty or not a source, or the processes' sources do not go together.
        BatchError: the global batch of a random-access source does not divide where `partial` requires it.

    Example:
        >>> import numpy as np
        >>> from jdist.data import FeedOptions, distributed_dataset, from_arrays
        >>> source = from_arrays({"x": np.arange(3)}, global_batch=2)
        >>> [b["mask"].tolist() for b in distributed_dataset(source, FeedOptions(num_replicas=2))]
        [[True, True], [True, False]]
    """
    source = adapted(source)
    check_source(source)
    check_turns(source, options.batch_axis)
    if not isinstance(source, RandomAccessSource | SequentialSource):
        source = IterableSource(source)
    reader = _reader(source, options)
    if reader.numbered is not None and reader.full is not None:
        check_divisible(reader.full, options)
    return DistributedDataset(reader, options)


def _reader(source: Source, options: FeedOptions) -> GlobalReader:
    """Makes this process's reader of a source."""
    share, peers, autoshard = options.share, options.peers, options.input.autoshard
    if share.count > 1 and peers is None and autoshard in ("file", "off"):
        raise DatasetError(
            f"`autoshard` is {autoshard!r}, and the processes must then agree on each step, but the strategy cannot "
            "reach the others. Make it with `jdist.multi_worker()`"
        )
    if share.count == 1 or peers is None:
        return _global_reader(source, dataclasses.replace(options, peers=None))

    def take() -> tuple[Policy, Source]:
        policy = _policy(source, share, autoshard)
        return policy, _local_files(source, share) if policy == "file" else source

    (policy, local), descriptions = peers.together("the source", take, lambda taken: _describe(source, taken[0], peers))
    check_alike(
        [each["alike"] for each in descriptions],
        "the sources of the processes",
        'Every process must make the same; for parts of their own use `autoshard="off"`',
    )
    if policy == "data":
        _say_what_is_read(source, share)
        return _global_reader(source, options)
    if options.shapes > 1:
        raise DatasetError(
            f"`shapes` is {options.shapes}, but autoshard={policy!r} gives each process batches of its own, and their "
            'shapes may differ in one step. Let all processes make the same batches, `jdist.InputOptions(autoshard="data")`'
        )
    return LocalReader(local, options, peers, descriptions)


def _global_reader(source: Source, options: FeedOptions) -> GlobalReader:
    if options.partial == "drop" and isinstance(source, RowsByNumber):
        source = dataclasses.replace(
            source, drop_short=True
        )  # so that its steps count, and number, the batches that are left
    return GlobalReader(source, options)


def _policy(source: Source, share: ProcessShard, autoshard: Policy) -> Policy:
    """Decides how processes share a source; refuses one that is split in another way."""
    part = getattr(source, "own_part", None)
    if part is None or part == (0, 1):
        return ("file" if has_files_for(source, share.count) else "data") if autoshard == "auto" else autoshard
    here = f"process {share.index} of {share.count}"
    if autoshard in ("file", "data"):
        raise DatasetError(
            f"`autoshard` is {autoshard!r}, so the processes share one source, but the {kind_of(source)} gives this "
            f"process only part {part[0]} of {part[1]}. Leave `autoshard` out, or let the {kind_of(source)} give all data"
        )
    if autoshard == "auto" and part != (share.index, share.count):
        raise DatasetError(
            f"the {kind_of(source)} gives part {part[0]} of {part[1]} to this process, which is {here}, so rows would be left "
            'out or count twice. Give it the process\'s own number, or if that is meant `InputOptions(autoshard="off")`'
        )
    return "off"


def _say_what_is_read(source: Source, share: ProcessShard) -> None:
    """Tells once that each process reads the data of all, where another library could give it its own."""
    how = getattr(source, "how_to_share", "") or None
    if isinstance(source, BatchSource):
        how = "batch it last, after all changes of rows, and without a `batch_fn`: a process then reads only its rows"
    elif how is not None:
        how = f"let it give each process its part, by {how}"
    if how is not None and share.index == 0:
        warnings.warn(
            f"each of the {share.count} processes reads all batches of the {kind_of(source)}, and keeps its rows. To read "
            f"less, {how}.",
            UserWarning,
            stacklevel=2,
        )


def _local_files(source: Source, share: ProcessShard) -> FileSource:
    source = by_file(source, share.count, share.index, option="autoshard")
    below = source.global_batch // share.count * share.count
    if below != source.global_batch:
        nearest = f"{below} or {below + share.count}" if below else f"{share.count}"
        raise BatchError(
            f"a global batch of {source.global_batch} rows does not divide by {share.count} processes, and with "
            f'autoshard="file" each makes its own rows; use a global batch of {nearest}, or autoshard="data"'
        )
    return dataclasses.replace(source, global_batch=source.global_batch // share.count)


def _describe(source: Source, autoshard: Policy, peers: Peers) -> dict[str, Any]:
    """Describes a source for the other processes: facts that must be the same on all, and those of this one."""
    random_access = not isinstance(source, SequentialSource)
    kind = "random-access" if random_access else "iterable" if source.advice else "one with states"
    alike = {"the kind of source": kind, "`autoshard`": autoshard}
    if isinstance(source, FileSource) and autoshard != "off":
        names = "\n".join(os.path.basename(os.fspath(path)) for path in source.paths)
        alike["the number of files"] = f"{len(source.paths):,}"
        alike["the hash of the files' names"] = hashlib.sha256(os.fsencode(names)).hexdigest()[:16]
        alike |= fields(source.fingerprint)
    elif autoshard == "data" and kind != "iterable":
        alike |= fields(source.fingerprint) | {"the fingerprint": source.fingerprint}
    description: dict[str, Any] = {"alike": peers.bounded(json.dumps(alike))}
    if random_access and autoshard == "off":
        description["full"] = int(source.global_batch)  # JSON knows no numbers of numpy
        description["steps"] = None if source.num_steps is None else int(source.num_steps)
        description["fingerprint"] = peers.bounded(source.fingerprint)
    return description
