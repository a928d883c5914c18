"""Groups the leaves of a state that have to live on one server, for all the steps that update it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jdist.ps.program.update_units import Unit, Update, connected


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
    # These are a step that updates and one that only reads; and, over several servers, two steps
    # that change an everywhere leaf by different functions. Servers may take two closures in
    # different orders, and their copies would differ.
    return frozenset(
        (i, j)
        for (i, a), (j, b) in itertools.permutations(enumerate(updates), 2)
        if bool(a.reads) != bool(b.reads) or (num_shards > 1 and not _commute(a, b, groups.everywhere))
    )


def _commute(a: Update, b: Update, everywhere: tuple[int, ...]) -> bool:
    """Whether the copies of these leaves come out alike, in whatever order two steps update them."""
    links = [(i, j) for update in (a, b) for i, reads in update.reads.items() for j in reads]
    return all(
        a.formula(leaves) == b.formula(leaves)
        for leaves in connected(everywhere, links)
        if all(any(i in update.reads for i in leaves) for update in (a, b))
    )


def units_in(update: Update, group: Group) -> list[Unit]:
    """The units of one step that a group holds."""
    return [unit for unit in update.units if unit.leaves[0] in group.leaves]


def changed_in(update: Update, group: Group) -> tuple[int, ...]:
    """The leaves of a group that one step changes."""
    return tuple(i for i in group.leaves if i in update.reads)


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
    """Whether each step changes these leaves in units that may be cut."""
    if len({updates[0].shapes[i].shape for i in leaves}) > 1:
        return False
    for update in updates:
        cut = {i for unit in update.units if unit.by_rows for i in unit.leaves}
        if any(i in update.reads and i not in cut for i in leaves):
            return False
    return True
