"""Shards of a source, each for one of several input pipelines: by files, or by rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import jax

from jdist.data.adapters.recognize import adapted
from jdist.data.options import Policy
from jdist.data.sources.files import FileSource
from jdist.data.sources.protocol import (
    RandomAccessSource,
    check_source,
    steps_from,
)
from jdist.data.sources.rows import ArraySource, check_step
from jdist.errors import DatasetError
from jdist.support import checks
from jdist.typing import PyTree


def shard(source: Any, num_shards: int, index: int, policy: Policy = "auto") -> Any:
    """Takes the part of a source that one of several input pipelines reads; all parts together are the whole.

    What is shared out are the rows of `from_arrays` and `from_files`, and the elements (batches) of any other source.
    The size of batches is unchanged: a source that is sharded makes batches for its pipeline alone. Shards may
    differ by one row or element.

    Args:
        source: `jdist.data.from_arrays(...)`, `jdist.data.from_files(...)`, a random-access source, or any iterable.
        num_shards: how many pipelines share it.
        index: which of them this is, from 0.
        policy: "data": element i goes to shard `i % num_shards`; every pipeline reads files whole and keeps its rows.
            "file": file i goes to shard `i % num_shards`, so a pipeline reads its own files only. "auto": by file
            where there are at least as many files as shards, else by data. "off": the whole source for everyone.

    Returns:
        A source of the same kind. One that could be resumed still can be: `state()` tells the shards apart.

    Raises:
        DatasetError: a number or the policy is not allowed, "file" is asked of a source without enough files, or
            nothing is left for this shard.

    Example:
        >>> from jdist.data import shard
        >>> [list(shard(range(10), 3, index)) for index in range(3)]
        [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]

    Source: `tf.data.experimental.AutoShardPolicy`.
    """
    checks.choice("policy", policy, get_args(Policy), DatasetError)
    num_shards = checks.whole_number("num_shards", num_shards, DatasetError)
    index = checks.whole_number("index", index, DatasetError, least=0, most=num_shards - 1)
    source = adapted(source)
    check_source(source)
    if policy == "off":
        return source
    if policy == "file" or (policy == "auto" and has_files_for(source, num_shards)):
        return by_file(source, num_shards, index)
    return _by_data(source, num_shards, index)


def has_files_for(source: Any, num_shards: int) -> bool:
    """Returns whether a source can be shared by file."""
    return isinstance(source, FileSource) and source.every == 1 and len(source.paths) >= num_shards


def by_file(source: Any, num_shards: int, index: int, *, option: str = "policy") -> FileSource:
    """Takes one of `num_shards` parts of a source's files; errors name the argument `option`."""
    if not isinstance(source, FileSource):
        raise DatasetError(
            f"a {type(source).__name__} cannot be shared file by file, as it does not tell its files; make it with "
            f'`jdist.data.from_files(paths, read, global_batch=...)`, or use {option}="data"'
        )
    if source.every > 1:
        raise DatasetError(
            f"the files are shared by rows already (1 row in {source.every}), and rows cannot be counted when files "
            f'are left out; share by file first, or use {option}="data"'
        )
    if len(source.paths) < num_shards:
        raise DatasetError(
            f"too few files: {len(source.paths)} cannot be shared by {num_shards} pipelines file by file. Use "
            f'{option}="data" (each reads all files and keeps 1 row in {num_shards}), or at least {num_shards} files'
        )
    return dataclasses.replace(source, paths=source.paths[index::num_shards])


def _by_data(source: Any, num_shards: int, index: int) -> Any:
    if isinstance(source, FileSource):
        return dataclasses.replace(source, every=source.every * num_shards, first=source.first + source.every * index)
    if isinstance(source, ArraySource):
        _check_some_left(source.num_rows, "rows", num_shards, index)
        every, first = source.shard or (1, 0)
        return dataclasses.replace(
            source,
            arrays=jax.tree.map(lambda leaf: leaf[index::num_shards], source.arrays),
            shard=(every * num_shards, first + every * index),
        )
    if isinstance(source, RandomAccessSource):
        if source.num_steps is not None:
            _check_some_left(source.num_steps, "batches", num_shards, index)
        return RandomAccessShard(source, num_shards, index)
    if isinstance(source, Iterator):
        return itertools.islice(source, index, None, num_shards)
    return IterableShard(source, num_shards, index)


def _check_some_left(count: int, what: str, num_shards: int, index: int) -> None:
    if index >= count:
        raise DatasetError(
            f"nothing is left for shard {index} of {num_shards}: the source has {count} {what}; use at most {count} "
            'shards, or policy="off" (everyone has all)'
        )


@dataclass(frozen=True)
class IterableShard(Iterable[PyTree]):
    """Every `num_shards`-th element of an iterable, from number `index` on."""

    source: Iterable[PyTree]
    num_shards: int
    index: int

    def __iter__(self) -> Iterator[PyTree]:
        return itertools.islice(self.source, self.index, None, self.num_shards)


@dataclass(frozen=True)
class RandomAccessShard(Iterable[PyTree]):
    """Every `num_shards`-th batch of a random-access source, from number `index` on; see `RandomAccessSource`."""

    source: RandomAccessSource
    num_shards: int
    index: int

    @property
    def num_steps(self) -> int | None:
        steps = self.source.num_steps
        return None if steps is None else len(range(self.index, steps, self.num_shards))

    @property
    def global_batch(self) -> int:
        return self.source.global_batch

    @property
    def fingerprint(self) -> str:
        return f"shard={self.index}/{self.num_shards} {self.source.fingerprint}"

    def batch_at(self, step: int) -> PyTree:
        """Makes batch number `step` of this shard, from 0."""
        check_step(step, self.num_steps, "shard")
        return self.source.batch_at(self.index + step * self.num_shards)

    def __iter__(self) -> Iterator[PyTree]:
        return map(self.batch_at, steps_from(self, 0))
