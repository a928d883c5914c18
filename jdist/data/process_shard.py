"""The rows of a global batch that a process feeds to its replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist.data.leaves import count_rows
from jdist.data.position import Place
from jdist.data.sources.protocol import RandomAccessSource, kind_of
from jdist.data.sources.rows import RowsByNumber
from jdist.errors import BatchError

PyTree = Any
Take = Callable[[PyTree], PyTree]  # makes numpy arrays of a source's batch, rows first


@dataclass(frozen=True, kw_only=True)
class ProcessShard:
    """A process's part of every global batch: its replicas' rows of the padded batch."""

    # So a row is on the same replica for any number of processes, and the padding is at the end of
    # the global batch.

    index: int = 0  # the process
    count: int = 1  # how many processes share a batch

    def sizes(self, num_rows: int, padded: int) -> tuple[int, ...]:
        """Counts the real rows of each process in a batch that is filled up to `padded` rows over all processes."""
        each = padded // self.count
        before_last = [min(max(num_rows - i * each, 0), each) for i in range(self.count - 1)]
        return *before_last, num_rows - sum(before_last)


WHOLE = ProcessShard()


class LocalRows(NamedTuple):
    """This process's rows of a global batch."""

    batch: PyTree  # leaves [rows, ...]: its own rows, then perhaps rows that fill up
    sizes: tuple[int, ...]  # the number of rows of each process
    # sizes of a full batch; empty: shared like the source's global batch
    full: tuple[int, ...] = ()


Part = tuple[Place, LocalRows]  # the place behind a batch, and this process's rows of it


def part_of(batch: PyTree, share: ProcessShard, rows: int) -> LocalRows:
    """Takes this process's part of a global batch of numpy arrays that is padded to `rows` over all processes."""
    num_rows = count_rows(batch)
    sizes = share.sizes(num_rows, rows)
    if share.count == 1 or num_rows == 0:
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
