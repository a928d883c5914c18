"""Lays a state out over servers: the rows of leaves that each keeps, the pushes to it, and the pulls from it."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from jdist.ps.program.partition import Partitioner, Placement, Rows, place
from jdist.ps.program.shard_plan import ShardPlan, StepShare
from jdist.ps.program.split_step import SplitStep
from jdist.ps.program.update_units import Unit, Update, connected
from jdist.ps.protocol.shard import Rules
from jdist.ps.protocol.wire import ROUNDED, spec_of

Wire = Literal["float32", "bf16"]  # bfloat16: half the bytes, the same range, eight bits of precision


@dataclass(frozen=True)
class Group:
    """Leaves that live on one server."""

    leaves: tuple[int, ...]  # their numbers in the state
    by_rows: bool  # may be cut by rows: every step computes each row from that row alone


@dataclass(frozen=True)
class Groups:
    """The leaves of a state by their place."""

    constant: tuple[int, ...]  # leaves that no step changes
    everywhere: tuple[int, ...]  # small leaves that every server copies; see `Update.everywhere`
    groups: tuple[Group, ...]  # the other leaves


@dataclass(frozen=True)
class Rounding:
    """The arrays that travel rounded."""

    leaves: frozenset[int]  # leaves of the state that workers pull rounded
    pushed: tuple[frozenset[int], ...]  # for each step, its pushed arrays that are rounded

    def of_leaf(self, i: int, shape: Any) -> Any:
        """Returns shape and dtype of a leaf as workers pull it."""
        return _rounded(shape) if i in self.leaves else shape

    def of_pushed(self, step: int, j: int, shape: Any) -> Any:
        """Returns shape and dtype of a pushed array."""
        return _rounded(shape) if j in self.pushed[step] else shape


@dataclass(frozen=True)
class Layout:
    """A state over its servers."""

    # the steps that read or update it; a step's number is its place here
    steps: tuple[SplitStep, ...]
    groups: Groups
    shards: tuple[ShardPlan, ...]  # the plan of each server that keeps a part of the state
    rounding: Rounding  # the arrays that travel rounded
    # pairs of steps with closures that must not mix; see `in_turn`
    in_turn: frozenset[tuple[int, int]]

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Shape and dtype of each leaf."""
        return self.steps[0].update.shapes

    def inputs(self, step: int) -> list[Any]:
        """Returns shape and dtype of each leaf that a worker reads for a step, as it travels."""
        return [self.rounding.of_leaf(i, self.shapes[i]) for i in self.steps[step].read]

    def worker(self, step: int, function: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
        """Adds rounding to both ends of a step's function, where XLA fuses it."""
        read, pushed = self.steps[step].read, self.steps[step].pushed
        n, m = len(read), len(pushed)

        def run(values: list[Any]) -> list[Any]:
            exact = [x.astype(self.shapes[i].dtype) for i, x in zip(read, values[:n], strict=True)]
            results = function([*exact, *values[n:]])
            rounded = [
                x.astype(self.rounding.of_pushed(step, j, x).dtype) for j, x in zip(pushed, results[:m], strict=True)
            ]
            return [*rounded, *results[m:]]

        return run

    def program(self, shard: ShardPlan, step: int) -> Callable[[list[Any]], list[Any]]:
        """Makes the program by which a server applies a push."""
        # It maps the server's arrays and the pushed ones, in any precision, to the server's arrays
        # that change, followed by rounded copies of those that are `rounded`.
        update, share = self.steps[step].update, shard.views[step]

        def run(values: list[Any]) -> list[Any]:
            kept = dict(zip(shard.rows, values, strict=False))
            rest = values[len(shard.rows) :]
            shapes = [*(update.pushed_shapes[rows.of] for rows in share.rows), *update.scalar_shapes]
            exact = [x.astype(shape.dtype) for x, shape in zip(rest, shapes, strict=True)]
            pushes = dict(zip(share.rows, exact, strict=False))
            scalars = exact[len(share.rows) :]
            whole = (*self.groups.everywhere, *self.groups.constant)
            shared = {i: kept[Rows(i)] for i in whole if Rows(i) in kept}
            everywhere = [i for i in self.groups.everywhere if i in update.reads]
            new = kept | {Rows(i): x for i, x in update.new_leaves(everywhere, shared, {}, scalars).items()}
            for group, piece in self._pieces(shard):
                leaves = update.new_leaves(
                    [i for i in group.leaves if i in update.reads],
                    {**shared, **{i: kept[dataclasses.replace(piece, of=i)] for i in group.leaves}},
                    {
                        j: pushes[dataclasses.replace(piece, of=j)]
                        for unit in units_in(update, group)
                        for j in unit.pushed
                    },
                    scalars,
                )
                new |= {dataclasses.replace(piece, of=i): x for i, x in leaves.items()}
            changed = [new[rows] for rows in shard.rows[: shard.changing]]
            return changed + [changed[k].astype(ROUNDED) for k in shard.rounded if k < shard.changing]

        return run

    def split_leaves(self, leaves: Sequence[Any]) -> list[list[np.ndarray]]:
        """Cuts whole leaves into what each server keeps."""
        return [[np.asarray(rows.cut(leaves[rows.of])) for rows in shard.rows] for shard in self.shards]

    def join_leaves(self, kept: Sequence[Sequence[Any]], leaves: Sequence[Any]) -> list[np.ndarray]:
        """Joins full leaves from each server's arrays; the arrays belong to the caller."""
        # `leaves` gives, by number, those that no server keeps; its other entries are ignored.
        on_servers = {rows.of for shard in self.shards for rows in shard.rows}
        joined = [
            np.empty(shape.shape, shape.dtype) if i in on_servers else np.array(leaves[i])
            for i, shape in enumerate(self.shapes)
        ]
        for shard, arrays in zip(self.shards, kept, strict=True):
            for rows, x in zip(shard.rows, arrays, strict=True):
                rows.put(joined[rows.of], x)
        return joined

    def _pieces(self, shard: ShardPlan) -> list[tuple[Group, Rows]]:
        """Returns the groups that a server keeps, each with its rows of the group's first leaf."""
        by_first = {group.leaves[0]: group for group in self.groups.groups}
        return [(by_first[rows.of], rows) for rows in shard.rows if rows.of in by_first]


def make_layout(
    steps: Sequence[SplitStep],
    *,
    num_ps: int,
    partitioner: Partitioner,
    placement: Placement = "round_robin",
    wire: Wire = "float32",
    rules: Rules = Rules(),  # noqa: B008  # it is frozen
    is_sync: bool = False,
) -> Layout:
    """Lays a state out over servers."""
    groups, shapes = make_groups([step.update for step in steps]), steps[0].update.shapes
    firsts = [shapes[group.leaves[0]] for group in groups.groups]
    pieces = place(
        [(tuple(shape.shape), np.dtype(shape.dtype)) for shape in firsts],
        num_ps=num_ps,
        partitioner=partitioner,
        whole=[not group.by_rows for group in groups.groups],
        placement=placement,
    )
    by_server: dict[int, list[Rows]] = collections.defaultdict(list)
    for server, rows in pieces:
        by_server[server].append(rows)
    used = sorted(by_server) or [0]
    rounding = make_rounding(steps, wire)
    shards = tuple(
        _plan(steps, groups, rounding, rules, server, by_server[server], is_first=server == used[0], is_sync=is_sync)
        for server in used
    )
    turns = in_turn([step.update for step in steps], groups, num_shards=len(shards))
    return Layout(tuple(steps), groups, shards, rounding, turns)


def _plan(
    steps: Sequence[SplitStep],
    groups: Groups,
    rounding: Rounding,
    rules: Rules,
    server: int,
    pieces: Sequence[Rows],
    *,
    is_first: bool,
    is_sync: bool,
) -> ShardPlan:
    """Plans the shard of a server, which keeps `pieces` (rows by a group's number)."""
    # `is_first`: workers pull from it the leaves that all servers, or it alone, keep.
    kept = [Rows(i) for i in groups.everywhere]
    for piece in pieces:
        kept += [dataclasses.replace(piece, of=i) for i in groups.groups[piece.of].leaves]
    changing, here = len(kept), {rows.of for rows in kept}
    needed = {j for step in steps for i, reads in step.update.reads.items() if i in here for j in reads}
    if is_first:
        needed |= {i for step in steps for i in step.read}
    kept += [Rows(i) for i in groups.constant if i in needed]

    def share_of(number: int, step: SplitStep) -> StepShare:
        rows = tuple(
            dataclasses.replace(piece, of=j)
            for piece in pieces
            for unit in units_in(step.update, groups.groups[piece.of])
            for j in unit.pushed
        )
        shapes = step.update.pushed_shapes
        pushes = tuple(r.spec(rounding.of_pushed(number, r.of, shapes[r.of])) for r in rows)
        scalars = tuple(map(spec_of, step.update.scalar_shapes))
        read = [k for k, r in enumerate(kept) if r.of in step.read]
        return StepShare(
            rows=rows,
            pushes=pushes if is_sync else pushes + scalars,
            scalars=scalars if is_sync else (),
            pulled=tuple(k for k in read if k < changing and (is_first or kept[k].of not in groups.everywhere)),
            pulled_once=tuple(k for k in read if k >= changing and is_first),
            unweighted=tuple(n for n, r in enumerate(rows) if r.of not in step.gradients),
        )

    shares = tuple(share_of(number, step) for number, step in enumerate(steps))
    sent = {k for share in shares for k in (*share.pulled, *share.pulled_once)}
    return ShardPlan(
        server=server,
        rows=tuple(kept),
        kept=tuple(rows.spec(steps[0].update.shapes[rows.of]) for rows in kept),
        changing=changing,
        views=shares,
        rules=rules,
        rounded=tuple(k for k in sorted(sent) if kept[k].of in rounding.leaves),
        weighs=is_sync or rules.on_stale == "down_weight",
    )


def make_groups(updates: Sequence[Update]) -> Groups:
    """Groups the leaves of a state so that leaves that any step needs together are together."""
    leaves = range(len(updates[0].shapes))
    constant = {i for i in leaves if all(i in update.constant for update in updates)}
    everywhere = _everywhere(updates, constant)
    placed = [i for i in leaves if i not in constant | everywhere]
    links = [(i, j) for update in updates for i, reads in update.reads.items() for j in reads]
    links += [pair for update in updates for unit in update.units for pair in itertools.pairwise(unit.leaves)]
    groups = tuple(Group(members, _by_rows(updates, members)) for members in sorted(connected(placed, links)))
    return Groups(tuple(sorted(constant)), tuple(sorted(everywhere)), groups)


def in_turn(updates: Sequence[Update], groups: Groups, *, num_shards: int) -> frozenset[tuple[int, int]]:
    """Finds the pairs of steps, by number, that must not overlap."""
    # These are a step that updates and one that only reads; and, over several servers, two that
    # change an everywhere leaf differently: servers may order two closures differently.
    return frozenset(
        (i, j)
        for (i, a), (j, b) in itertools.permutations(enumerate(updates), 2)
        if bool(a.reads) != bool(b.reads) or (num_shards > 1 and not _commute(a, b, groups.everywhere))
    )


def _commute(a: Update, b: Update, everywhere: tuple[int, ...]) -> bool:
    """Returns whether the copies of these leaves come out alike, in whatever order two steps update them."""
    links = [(i, j) for update in (a, b) for i, reads in update.reads.items() for j in reads]
    return all(
        a.formula(leaves) == b.formula(leaves)
        for leaves in connected(everywhere, links)
        if all(any(i in update.reads for i in leaves) for update in (a, b))
    )


def units_in(update: Update, group: Group) -> list[Unit]:
    """The units of one step that a group holds."""
    return [unit for unit in update.units if unit.leaves[0] in group.leaves]


def _everywhere(updates: Sequence[Update], constant: set[int]) -> set[int]:
    """Leaves that are everywhere for each step that changes them, with all that they are computed from."""
    changed_as_unit = {i for update in updates for unit in update.units for i in unit.leaves}
    chosen = {i for update in updates for i in update.everywhere} - changed_as_unit
    while outside := {
        i for update in updates for i, reads in update.reads.items() if i in chosen and not reads <= chosen | constant
    }:
        chosen -= outside
    return chosen


def _by_rows(updates: Sequence[Update], leaves: tuple[int, ...]) -> bool:
    """Returns whether each step changes these leaves in units that may be cut."""
    if len({updates[0].shapes[i].shape for i in leaves}) > 1:
        return False
    for update in updates:
        cut = {i for unit in update.units if unit.by_rows for i in unit.leaves}
        if any(i in update.reads and i not in cut for i in leaves):
            return False
    return True


def make_rounding(steps: Sequence[SplitStep], wire: Wire) -> Rounding:
    """Chooses the arrays to round: float32, but no single numbers and no carried leaves."""
    if wire == "float32":
        return Rounding(frozenset(), tuple(frozenset() for _ in steps))
    carried = {i for step in steps for i in _carried(step)}

    def pushed(step: SplitStep) -> frozenset[int]:
        exact = {j for unit in step.update.units if carried.intersection(unit.leaves) for j in unit.pushed}
        return frozenset(j for j in step.pushed if j not in exact and _may_be_rounded(step.update.pushed_shapes[j]))

    shapes = steps[0].update.shapes
    leaves = frozenset(i for i, shape in enumerate(shapes) if i not in carried and _may_be_rounded(shape))
    return Rounding(leaves, tuple(map(pushed, steps)))


def _carried(step: SplitStep) -> set[int]:
    """Finds the leaves that a worker reads and recomputes, such as a layer's running statistics."""
    # Rounded both ways, they would lose each small change.
    reads, carried = step.update.reads, step.carried.leaves
    return {i for i in step.read if i in reads and (i in carried or i not in reads[i])}


def _may_be_rounded(shape: Any) -> bool:
    return shape.dtype == np.float32 and len(shape.shape) > 0


def _rounded(shape: Any) -> Any:
    return jax.ShapeDtypeStruct(shape.shape, ROUNDED)
