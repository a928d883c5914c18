"""Which server keeps which rows of which leaf, what it gets from a worker, and what it gives."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jdist.ps.program.colocation import Groups, changed_in, in_turn, make_groups, units_in
from jdist.ps.program.partition import Partitioner, Piece, Placement, place
from jdist.ps.program.split_step import StepParts
from jdist.ps.program.wire_dtype import ROUNDED, Rounding, Wire, make_rounding
from jdist.ps.protocol.wire import Spec


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

    def put(self, array: np.ndarray, rows: Any) -> None:
        """Writes these rows of the array."""
        array[... if self.stop is None else slice(self.start, self.stop)] = rows

    def spec(self, shape: Any) -> Spec:
        """Shape and dtype of these rows, from those of the array."""
        rows = shape.shape if self.stop is None else (self.stop - self.start, *shape.shape[1:])
        return Spec(tuple(rows), np.dtype(shape.dtype).name)


@dataclass(frozen=True)
class View:
    """What one step takes from a server, and brings to it.

    Attributes:
        pushes: what it brings of a worker's arrays; the worker's scalars come behind.
        pulled: places in `kept` of what workers read and what changes.
        pulled_once: places in `kept` of what workers read and what never changes.
    """

    pushes: tuple[Rows, ...]
    pulled: tuple[int, ...]
    pulled_once: tuple[int, ...]


@dataclass(frozen=True)
class ShardLayout:
    """What one server keeps.

    Attributes:
        ps: the server's number.
        kept: its arrays; those that change come first.
        changing: how many of them change.
        pieces: what it keeps of the groups.
        views: for each step.
        rounded: places in `kept` of what workers pull rounded.
    """

    ps: int
    kept: tuple[Rows, ...]
    changing: int
    pieces: tuple[Piece, ...]
    views: tuple[View, ...]
    rounded: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A state over its servers.

    Attributes:
        steps: the steps that use it.
        groups: its leaves by where they are kept.
        shards: a layout for each server that keeps any part of the state; the others take no part.
        rounding: what travels rounded between servers and workers.
        in_turn: pairs of steps whose closures must not mix; see `groups.in_turn`.
    """

    steps: tuple[StepParts, ...]
    groups: Groups
    shards: tuple[ShardLayout, ...]
    rounding: Rounding
    in_turn: frozenset[tuple[int, int]]

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Shape and dtype of each leaf of the state."""
        return self.steps[0].update.shapes

    def kept_specs(self, shard: ShardLayout) -> list[Spec]:
        """Of the arrays that a server keeps."""
        return [rows.spec(self.shapes[rows.of]) for rows in shard.kept]

    def push_specs(self, shard: ShardLayout, step: int) -> list[Spec]:
        """Of the arrays, and then the scalars, that a server gets with a closure of a step, as they travel."""
        update = self.steps[step].update
        arrays = [
            rows.spec(self.rounding.of_pushed(step, rows.of, update.pushed_shapes[rows.of]))
            for rows in shard.views[step].pushes
        ]
        return arrays + [Spec((), np.dtype(shape.dtype).name) for shape in update.scalar_shapes]

    def inputs(self, step: int) -> list[Any]:
        """Shapes and dtypes of the leaves that a worker reads for a step, as they travel."""
        return [self.rounding.of_leaf(i, self.shapes[i]) for i in self.steps[step].read]

    def worker(self, step: int, function: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
        """A step's function with the rounding at both ends, where XLA fuses it with what is computed.

        Args:
            step: which of the steps.
            function: from what the step reads and a closure's arguments to what it pushes and the rest of its results.
        """
        parts = self.steps[step]
        n, m = len(parts.read), len(parts.pushed)

        def run(values: list[Any]) -> list[Any]:
            read = [x.astype(self.shapes[i].dtype) for i, x in zip(parts.read, values[:n], strict=True)]
            results = function([*read, *values[n:]])
            pushed = [
                x.astype(self.rounding.of_pushed(step, j, x).dtype)
                for j, x in zip(parts.pushed, results[:m], strict=True)
            ]
            return [*pushed, *results[m:]]

        return run

    def program(self, shard: ShardLayout, step: int) -> Callable[[list[Any]], list[Any]]:
        """What a server does with a push.

        Returns:
            From its arrays and what it was pushed, in whatever precision that came, to those of its arrays that change;
            behind them come rounded copies of those that are `rounded`.
        """
        update, view = self.steps[step].update, shard.views[step]

        def run(values: list[Any]) -> list[Any]:
            kept = dict(zip(shard.kept, values, strict=False))
            rest = values[len(shard.kept) :]
            shapes = [*(update.pushed_shapes[rows.of] for rows in view.pushes), *update.scalar_shapes]
            given = [x.astype(shape.dtype) for x, shape in zip(rest, shapes, strict=True)]
            pushes = dict(zip(view.pushes, given, strict=False))
            scalars = given[len(view.pushes) :]
            whole = (*self.groups.everywhere, *self.groups.constant)
            shared = {i: kept[Rows(i)] for i in whole if Rows(i) in kept}
            new = kept | {Rows(i): x for i, x in update.new_leaves(self._everywhere(step), shared, {}, scalars).items()}
            for piece in shard.pieces:
                group = self.groups.groups[piece.leaf]
                made = update.new_leaves(
                    changed_in(update, group),
                    {**shared, **{i: kept[Rows(i, piece.start, piece.stop)] for i in group.leaves}},
                    {
                        j: pushes[Rows(j, piece.start, piece.stop)]
                        for unit in units_in(update, group)
                        for j in unit.pushed
                    },
                    scalars,
                )
                new |= {Rows(i, piece.start, piece.stop): x for i, x in made.items()}
            changed = [new[rows] for rows in shard.kept[: shard.changing]]
            return changed + [changed[k].astype(ROUNDED) for k in shard.rounded if k < shard.changing]

        return run

    def shares(self, shard: ShardLayout, step: int, arrays: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
        """A server's part of what a worker computed for a step: the arrays `pushed`, and the scalars."""
        by_number = dict(zip(self.steps[step].pushed, arrays, strict=True))
        return [rows.cut(by_number[rows.of]) for rows in shard.views[step].pushes] + list(scalars)

    def shared_out(self, leaves: Sequence[Any]) -> list[list[np.ndarray]]:
        """What each server keeps of whole leaves."""
        return [[np.asarray(rows.cut(leaves[rows.of])) for rows in shard.kept] for shard in self.shards]

    def unpack_shard(self, kept: Sequence[Sequence[Any]], leaves: Sequence[Any]) -> list[np.ndarray]:
        """Whole leaves, arrays of the caller's own, from what each server keeps; `leaves` has those that no server keeps."""
        known = {rows.of for shard in self.shards for rows in shard.kept}
        found = [
            np.empty(shape.shape, shape.dtype) if i in known else np.array(leaves[i])
            for i, shape in enumerate(self.shapes)
        ]
        for shard, arrays in zip(self.shards, kept, strict=True):
            for rows, x in zip(shard.kept, arrays, strict=True):
                rows.put(found[rows.of], x)
        return found

    def _everywhere(self, step: int) -> tuple[int, ...]:
        return tuple(i for i in self.groups.everywhere if i in self.steps[step].update.reads)


def make_layout(
    steps: Sequence[StepParts],
    *,
    num_ps: int,
    partitioner: Partitioner,
    placement: Placement = "round_robin",
    wire: Wire = "float32",
) -> Layout:
    """Shares a state out over servers.

    Args:
        steps: the steps that will read and update it.
        num_ps: how many servers there are.
        partitioner: into how many pieces leaves are cut whose updates allow it.
        placement: which server gets the next piece, as for `partition.place`.
        wire: as what float32 arrays travel, as for `jdist.parameter_server`.

    Raises:
        StrategyError: as `partition.place`.
    """
    groups, shapes = make_groups([step.update for step in steps]), steps[0].update.shapes
    firsts = [shapes[group.leaves[0]] for group in groups.groups]
    pieces = place(
        [(tuple(shape.shape), np.dtype(shape.dtype)) for shape in firsts],
        num_ps=num_ps,
        partitioner=partitioner,
        whole=[not group.by_rows for group in groups.groups],
        placement=placement,
    )
    by_ps: dict[int, list[Piece]] = collections.defaultdict(list)
    for piece in pieces:
        by_ps[piece.ps].append(piece)
    used = sorted(by_ps) or [0]
    rounding = make_rounding(steps, wire)
    shards = tuple(_shard(steps, groups, rounding, ps, by_ps[ps], is_first=ps == used[0]) for ps in used)
    turns = in_turn([step.update for step in steps], groups, num_shards=len(shards))
    return Layout(tuple(steps), groups, shards, rounding, turns)


def _shard(
    steps: Sequence[StepParts], groups: Groups, rounding: Rounding, ps: int, pieces: Sequence[Piece], *, is_first: bool
) -> ShardLayout:
    kept = [Rows(i) for i in groups.everywhere]
    for piece in pieces:
        kept += [Rows(i, piece.start, piece.stop) for i in groups.groups[piece.leaf].leaves]
    changing, here = len(kept), {rows.of for rows in kept}
    needed = {j for step in steps for i, reads in step.update.reads.items() if i in here for j in reads}
    if is_first:  # which gives workers what they read
        needed |= {i for step in steps for i in step.read}
    kept += [Rows(i) for i in groups.constant if i in needed]

    def view(step: StepParts) -> View:
        pushes = [
            Rows(j, piece.start, piece.stop)
            for piece in pieces
            for unit in units_in(step.update, groups.groups[piece.leaf])
            for j in unit.pushed
        ]
        pulled = [k for k, rows in enumerate(kept) if rows.of in step.read]
        return View(
            tuple(pushes),
            tuple(k for k in pulled if k < changing and (is_first or kept[k].of not in groups.everywhere)),
            tuple(k for k in pulled if k >= changing and is_first),
        )

    views = tuple(map(view, steps))
    sent = {k for found in views for k in (*found.pulled, *found.pulled_once)}
    rounded = tuple(k for k in sorted(sent) if kept[k].of in rounding.leaves)
    return ShardLayout(ps, tuple(kept), changing, tuple(pieces), views, rounded)
