"""Which rows of a global batch a process feeds to its replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jdist.data.arrays import ArraySource
from jdist.data.leaves import count_rows, to_numpy
from jdist.data.source import RandomAccessSource

PyTree = Any


@dataclass(frozen=True, kw_only=True)
class Share:
    """A process's part of every global batch: as many successive rows as any other's, or one less.

    Attributes:
        index: the process, from 0.
        count: how many processes share a batch.

    Example:
        >>> Share(index=1, count=2).rows(6)  # of 6 rows the last three
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


WHOLE = Share()


class Part(NamedTuple):
    """This process's rows of a global batch.

    Attributes:
        batch: leaves [rows, ...]. A process that has no row left holds one that is not its own, to fill up with.
        sizes: how many rows each process has.
    """

    batch: PyTree
    sizes: tuple[int, ...]


def part_of(batch: PyTree, share: Share) -> Part:
    """This process's part of a global batch that it has read whole."""
    batch = to_numpy(batch)
    found = count_rows(batch)
    start, stop = share.rows(found)
    if share.count > 1:
        start = min(start, max(0, found - 1))
        batch = jax.tree.map(lambda leaf: leaf[start : max(stop, start + 1)], batch)
    return Part(batch, share.sizes(found))


def read_part(source: RandomAccessSource, step: int, share: Share) -> Part:
    """This process's part of batch number `step`; of arrays only its rows are read."""
    if share.count == 1 or not isinstance(source, ArraySource):
        return part_of(source.batch_at(step), share)
    found = source.rows_of(step)
    start, stop = share.rows(found)
    start = min(start, found - 1)
    return Part(source.batch_at(step, slice(start, max(stop, start + 1))), share.sizes(found))
