"""Cuts leaves into pieces by rows, and chooses the parameter server that keeps each piece."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from jdist.errors import StrategyError
from jdist.ps.protocol.wire import Spec
from jdist.support import checks

Partitioner = Callable[[tuple[int, ...], np.dtype, int], int]
Placement = Literal["round_robin", "bytes"]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a numbered array."""

    of: int  # the array's number: a leaf of the state, or a pushed array
    start: int = 0
    # the row after the last; None for the full array, which may be a scalar
    stop: int | None = None

    def cut(self, array: Any) -> Any:
        """Returns these rows of the array."""
        return array if self.stop is None else array[self.start : self.stop]

    def put(self, array: np.ndarray, rows: Any) -> None:
        """Writes these rows of the array."""
        array[... if self.stop is None else slice(self.start, self.stop)] = rows

    def spec(self, array: Any) -> Spec:
        """Returns the spec of these rows, from shape and dtype of the array."""
        rows = array.shape if self.stop is None else (self.stop - self.start, *array.shape[1:])
        return Spec(tuple(rows), np.dtype(array.dtype).name)


def fixed_shards(n: int) -> Partitioner:
    """Cuts every leaf into `n` pieces along its first axis, or into its rows where there are fewer.

    Args:
        n: number of pieces.

    Raises:
        StrategyError: `n` is less than 1.

    Example:
        >>> fixed_shards(2)((10, 3), np.dtype("float32"), 4)
        2

    Source: `tf.distribute.experimental.partitioners.FixedShardsPartitioner`.
    """
    n = checks.whole_number("n", n, StrategyError, call="jdist.ps.fixed_shards")
    return lambda shape, dtype, num_ps: min(n, _rows(shape))


def min_size(size_bytes: int = 256 << 10, max_shards: int | None = None) -> Partitioner:
    """Cuts a leaf into as many pieces as possible of at least `size_bytes` each.

    Args:
        size_bytes: a piece's least size; a smaller leaf stays whole.
        max_shards: number of pieces of a leaf at most; None: as many as there are parameter servers.

    Raises:
        StrategyError: an argument is less than 1.

    Example:
        >>> min_size(4, max_shards=2)((6, 1), np.dtype("float32"), 3)
        2

    Source: `tf.distribute.experimental.partitioners.MinSizePartitioner`, which rounds up and so also makes smaller pieces.
    """
    size_bytes, max_shards = _checked("jdist.ps.min_size", size_bytes, max_shards)

    def partitioner(shape: tuple[int, ...], dtype: np.dtype, num_ps: int) -> int:
        most = num_ps if max_shards is None else max_shards
        row = _row_bytes(shape, dtype)
        rows_of_a_piece = math.ceil(size_bytes / row) if row else _rows(shape)
        return max(1, min(most, _rows(shape) // rows_of_a_piece))

    return partitioner


def max_size(size_bytes: int, max_shards: int | None = None) -> Partitioner:
    """Cuts a leaf into as few pieces as possible of at most `size_bytes` each; a row is never cut.

    Args:
        size_bytes: a piece's largest size.
        max_shards: number of pieces of a leaf at most, which may make them larger; None: no limit.

    Raises:
        StrategyError: an argument is less than 1.

    Example:
        >>> max_size(4)((6, 1), np.dtype("float32"), 3)
        6

    Source: `tf.distribute.experimental.partitioners.MaxSizePartitioner`.
    """
    size_bytes, max_shards = _checked("jdist.ps.max_size", size_bytes, max_shards)

    def partitioner(shape: tuple[int, ...], dtype: np.dtype, num_ps: int) -> int:
        row = _row_bytes(shape, dtype)
        rows_of_a_piece = max(1, size_bytes // row) if row else _rows(shape)
        pieces = math.ceil(_rows(shape) / rows_of_a_piece)
        return pieces if max_shards is None else min(pieces, max_shards)

    return partitioner


def row_sizes(rows: int, pieces: int) -> list[int]:
    """Divides rows over pieces that differ by one row at most; the larger come first."""
    return [rows // pieces + (i < rows % pieces) for i in range(pieces)]


def place(
    leaves: Sequence[tuple[tuple[int, ...], np.dtype]],
    *,
    num_ps: int,
    partitioner: Partitioner,
    whole: Sequence[bool] | None = None,
    placement: Placement = "round_robin",
) -> list[tuple[int, Rows]]:
    """Cuts leaves (shape and dtype) and assigns the pieces, in order, to servers."""
    # `whole` leaves are not cut. "bytes" places each piece on the server that has least so far.
    load, turn = [0] * num_ps, itertools.count()

    def next_ps(size_bytes: int) -> int:
        ps = next(turn) % num_ps if placement == "round_robin" else load.index(min(load))
        load[ps] += size_bytes
        return ps

    pieces = []
    for leaf, (shape, dtype) in enumerate(leaves):
        count = 1 if not shape or (whole is not None and whole[leaf]) else _pieces(partitioner, shape, dtype, num_ps)
        if count == 1:
            pieces.append((next_ps(math.prod(shape) * dtype.itemsize), Rows(leaf)))
            continue
        stops = list(itertools.accumulate(row_sizes(shape[0], count)))
        for start, stop in zip([0, *stops], stops, strict=False):
            ps = next_ps((stop - start) * _row_bytes(shape, dtype))
            pieces.append((ps, Rows(leaf, start, stop)))
    return pieces


def _pieces(partitioner: Partitioner, shape: tuple[int, ...], dtype: np.dtype, num_ps: int) -> int:
    pieces = partitioner(shape, dtype, num_ps)
    fix = f"The leaf has the shape {shape}, and is cut into that many pieces by rows."
    return checks.whole_number("partitioner(...)", pieces, StrategyError, most=_rows(shape), fix=fix)


def _rows(shape: tuple[int, ...]) -> int:
    return max(1, shape[0]) if shape else 1


def _row_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape[1:]) * dtype.itemsize


def _checked(call: str, size_bytes: int, max_shards: int | None) -> tuple[int, int | None]:
    if max_shards is not None:
        max_shards = checks.whole_number("max_shards", max_shards, StrategyError, call=call)
    return checks.whole_number("size_bytes", size_bytes, StrategyError, call=call), max_shards
