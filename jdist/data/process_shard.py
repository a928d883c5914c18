"""The rows of a global batch that a process feeds to its replicas."""

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

    def sizes(self, num_rows: int) -> tuple[int, ...]:
        """Divides rows among the processes."""
        least, more = divmod(num_rows, self.count)
        return tuple(least + (i < more) for i in range(self.count))

    def rows(self, num_rows: int) -> tuple[int, int]:
        """Finds where this process's rows start and stop."""
        sizes = self.sizes(num_rows)
        start = sum(sizes[: self.index])
        return start, start + sizes[self.index]


WHOLE = ProcessShard()


class LocalRows(NamedTuple):
    """This process's rows of a global batch.

    Attributes:
        batch: leaves [rows, ...]: its own rows, then perhaps others to fill up with.
        sizes: the number of rows of each process.
        full: that of a full batch; empty: as the source's global batch is shared.
    """

    batch: PyTree
    sizes: tuple[int, ...]
    full: tuple[int, ...] = ()


NumberedPart = tuple[int, LocalRows]  # the position after a batch, and this process's rows of it


def part_of(batch: PyTree, share: ProcessShard, rows: int) -> LocalRows:
    """Takes this process's part of a global batch that is padded to `rows` over all processes."""
    batch = to_numpy(batch)
    num_rows = count_rows(batch)
    if share.count == 1 or num_rows == 0:
        return LocalRows(batch, share.sizes(num_rows))
    selected = _select(num_rows, share, rows)
    return LocalRows(jax.tree.map(lambda leaf: leaf[selected], batch), share.sizes(num_rows))


def read_part(source: RandomAccessSource, step: int, share: ProcessShard, rows: int) -> LocalRows:
    """Reads this process's part of batch number `step`, and of arrays nothing else; see `part_of`."""
    if share.count == 1 or not isinstance(source, ArraySource):
        return part_of(source.batch_at(step), share, rows)
    num_rows = source.rows_of(step)
    return LocalRows(source.batch_at(step, _select(num_rows, share, rows)), share.sizes(num_rows))


def _select(num_rows: int, share: ProcessShard, rows: int) -> slice | np.ndarray:
    """Selects this process's rows among those of a batch, and the rows that fill its part up.

    All processes together fill up with the rows that one process would, the first ones in turn, so that statistics of a
    batch do not depend on the number of processes.
    """
    each, sizes = rows // share.count, share.sizes(num_rows)
    start, stop = share.rows(num_rows)
    before = sum(each - size for size in sizes[: share.index])
    filling = each - sizes[share.index]
    if filling <= 0:
        return slice(start, stop)
    return np.concatenate([np.arange(start, stop), np.arange(before, before + filling) % num_rows])
