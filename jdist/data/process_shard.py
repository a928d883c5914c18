"""Which rows of a global batch a process feeds to its replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist.data.leaves import count_rows, to_numpy
from jdist.data.sources.arrays import ArraySource
from jdist.data.sources.protocol import RandomAccessSource

PyTree = Any


@dataclass(frozen=True, kw_only=True)
class ProcessShard:
    """A process's part of every global batch: as many successive rows as any other's, or one less.

    Attributes:
        index: the process, from 0.
        count: how many processes share a batch.

    Example:
        >>> ProcessShard(index=1, count=2).rows(6)  # of 6 rows the last three
        (3, 6)
    """

    index: int = 0
    count: int = 1

    def sizes(self, found: int) -> tuple[int, ...]:
        """How many of `found` rows each process has."""
        least, more = divmod(found, self.count)
        return tuple(least + (i < more) for i in range(self.count))

    def rows(self, found: int) -> tuple[int, int]:
        """The first of this process's rows among `found`, and the one behind its last."""
        sizes = self.sizes(found)
        start = sum(sizes[: self.index])
        return start, start + sizes[self.index]


WHOLE = ProcessShard()


class LocalRows(NamedTuple):
    """This process's rows of a global batch.

    Attributes:
        batch: leaves [rows, ...]: its own rows, then perhaps others to fill up with.
        sizes: how many rows each process has.
        full: how many it has of a full batch; none: as the source's global batch is shared.
    """

    batch: PyTree
    sizes: tuple[int, ...]
    full: tuple[int, ...] = ()


def part_of(batch: PyTree, share: ProcessShard, rows: int) -> LocalRows:
    """This process's part of a global batch that it has read whole.

    Args:
        batch: leaves [found, ...].
        share: which part.
        rows: rows of every batch as the replicas of all processes receive it.
    """
    batch = to_numpy(batch)
    found = count_rows(batch)
    if share.count == 1 or found == 0:
        return LocalRows(batch, share.sizes(found))
    taken = _taken(found, share, rows)
    return LocalRows(jax.tree.map(lambda leaf: leaf[taken], batch), share.sizes(found))


def read_part(source: RandomAccessSource, step: int, share: ProcessShard, rows: int) -> LocalRows:
    """As `part_of`, of batch number `step` of a source; of arrays nothing else is read."""
    if share.count == 1 or not isinstance(source, ArraySource):
        return part_of(source.batch_at(step), share, rows)
    found = source.rows_of(step)
    return LocalRows(source.batch_at(step, _taken(found, share, rows)), share.sizes(found))


def _taken(found: int, share: ProcessShard, rows: int) -> slice | np.ndarray:
    """Which of `found` rows this process takes: its own, and those which fill its part up.

    All processes together fill up with the rows that one process would, the first ones in turn: so statistics of a
    batch, which see them, do not depend on the number of processes.
    """
    own, sizes = rows // share.count, share.sizes(found)
    start, stop = share.rows(found)
    before = sum(own - size for size in sizes[: share.index])
    filling = own - sizes[share.index]
    if filling <= 0:
        return slice(start, stop)
    return np.concatenate([np.arange(start, stop), np.arange(before, before + filling) % found])
