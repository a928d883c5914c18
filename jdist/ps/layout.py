"""Which server keeps which rows of which leaf, what it gets from a worker, and what it gives."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jdist.ps.partition import Partitioner, Piece, Placement, place
from jdist.ps.program import StepParts
from jdist.ps.update import Update
from jdist.ps.wire import Spec


@dataclass(frozen=True)
class Rows:
    """Some rows of a numbered array.

    Attributes:
        of: the array's number: a leaf of the state, or a pushed array.
        start: the first row.
        stop: the row after the last; None for the whole array.
    """

    of: int
    start: int = 0
    stop: int | None = None

    def cut(self, array: Any) -> Any:
        """These rows of the array."""
        return array if self.stop is None else array[self.start : self.stop]

    def spec(self, shape: Any) -> Spec:
        """Shape and dtype of these rows, from those of the array."""
        rows = shape.shape if self.stop is None else (self.stop - self.start, *shape.shape[1:])
        return Spec(tuple(rows), np.dtype(shape.dtype).name)


@dataclass(frozen=True)
class ShardLayout:
    """What one server keeps, takes and gives.

    Attributes:
        ps: the server's number.
        kept: its arrays; those that change come first.
        changing: how many of them change.
        pushes: what it gets of a worker's arrays; the worker's scalars come behind.
        pulled: places in `kept` of what workers read and what changes.
        pulled_once: places in `kept` of what workers read and what never changes.
        units: places in `update.units` of its pieces, with their rows.
    """

    ps: int
    kept: tuple[Rows, ...]
    changing: int
    pushes: tuple[Rows, ...]
    pulled: tuple[int, ...]
    pulled_once: tuple[int, ...]
    units: tuple[tuple[int, int, int | None], ...]


@dataclass(frozen=True)
class Layout:
    """A state over its servers.

    Attributes:
        update: the update part.
        read: the leaves that a worker reads.
        pushed: the arrays that it pushes.
        shards: a layout for each server that keeps any part of the state; the others take no part.
    """

    update: Update
    read: tuple[int, ...]
    pushed: tuple[int, ...]
    shards: tuple[ShardLayout, ...]

    def kept_specs(self, shard: ShardLayout) -> list[Spec]:
        """Of the arrays that a server keeps."""
        return [rows.spec(self.update.shapes[rows.of]) for rows in shard.kept]

    def push_specs(self, shard: ShardLayout) -> list[Spec]:
        """Of the arrays, and then the scalars, that a server gets with a closure."""
        arrays = [rows.spec(self.update.pushed_shapes[rows.of]) for rows in shard.pushes]
        return arrays + [Spec((), np.dtype(shape.dtype).name) for shape in self.update.scalar_shapes]

    def program(self, shard: ShardLayout) -> Callable[[list[Any]], list[Any]]:
        """What a server does with a push: from its arrays and what it was pushed to those of its arrays that change."""
        update = self.update

        def run(values: list[Any]) -> list[Any]:
            kept = dict(zip(shard.kept, values, strict=False))
            rest = values[len(shard.kept) :]
            pushes = dict(zip(shard.pushes, rest, strict=False))
            scalars = rest[len(shard.pushes) :]
            shared = {i: kept[Rows(i)] for i in (*update.everywhere, *update.constant) if Rows(i) in kept}
            new = {Rows(i): x for i, x in update.new_everywhere(shared, scalars).items()}
            for number, start, stop in shard.units:
                unit = update.units[number]
                made = update.new_unit(
                    unit,
                    {**shared, **{i: kept[Rows(i, start, stop)] for i in unit.leaves}},
                    {j: pushes[Rows(j, start, stop)] for j in unit.pushed},
                    scalars,
                )
                new |= {Rows(i, start, stop): x for i, x in made.items()}
            return [new[rows] for rows in shard.kept[: shard.changing]]

        return run

    def shares(self, shard: ShardLayout, arrays: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
        """A server's part of what a worker computed.

        Args:
            shard: the server's layout.
            arrays: the arrays `pushed`.
            scalars: the scalars.
        """
        by_number = dict(zip(self.pushed, arrays, strict=True))
        return [rows.cut(by_number[rows.of]) for rows in shard.pushes] + list(scalars)


def make_layout(
    parts: StepParts, *, num_ps: int, partitioner: Partitioner, placement: Placement = "round_robin"
) -> Layout:
    """Shares a state out over servers.

    Args:
        parts: the step that will update it.
        num_ps: how many servers there are.
        partitioner: into how many pieces a unit is cut whose update allows it.
        placement: which server gets the next piece, as for `partition.place`.

    Raises:
        StrategyError: as `partition.place`.
    """
    update = parts.update
    shapes = [update.shapes[unit.leaves[0]] for unit in update.units]
    pieces = place(
        [(tuple(shape.shape), np.dtype(shape.dtype)) for shape in shapes],
        num_ps=num_ps,
        partitioner=partitioner,
        whole=[not unit.by_rows for unit in update.units],
        placement=placement,
    )
    by_ps: dict[int, list[Piece]] = collections.defaultdict(list)
    for piece in pieces:
        by_ps[piece.ps].append(piece)
    used = sorted(by_ps) or [0]
    return Layout(
        update,
        parts.read,
        parts.pushed,
        tuple(_shard(parts, ps, by_ps[ps], is_first=ps == used[0]) for ps in used),
    )


def _shard(parts: StepParts, ps: int, pieces: Sequence[Piece], *, is_first: bool) -> ShardLayout:
    update = parts.update
    kept = [Rows(i) for i in update.everywhere]
    pushes: list[Rows] = []
    for piece in pieces:
        unit = update.units[piece.leaf]
        kept += [Rows(i, piece.start, piece.stop) for i in unit.leaves]
        pushes += [Rows(j, piece.start, piece.stop) for j in unit.pushed]
    changing = len(kept)
    constant = {*update.everywhere_reads, *(i for piece in pieces for i in update.units[piece.leaf].constant)}
    if is_first:  # which gives workers what they read
        constant |= {i for i in update.constant if i in parts.read}
    kept += [Rows(i) for i in sorted(constant)]
    everywhere = {*update.everywhere}
    pulled = [k for k, rows in enumerate(kept[:changing]) if rows.of in parts.read]
    return ShardLayout(
        ps,
        tuple(kept),
        changing,
        tuple(pushes),
        tuple(k for k in pulled if is_first or kept[k].of not in everywhere),
        tuple(k for k in range(changing, len(kept)) if is_first and kept[k].of in parts.read),
        tuple((piece.leaf, piece.start, piece.stop) for piece in pieces),
    )
