"""Where each leaf of a state is updated, found in the traced update itself.

A step's update part is a jaxpr from the old state and what a worker computed to the new state. From what depends on
what in it follow the *units*: leaves that are updated together (a parameter, its momentum, its average), and so live on
one server. A unit whose update is elementwise may be cut by rows. What needs a whole gradient but no state (its norm,
for clipping) is a scalar, and the worker computes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jdist.jaxpr import graph
from jdist.jaxpr.elementwise import ELEMENTWISE, apply_stored

SMALL_BYTES = 64 << 10


@dataclass(frozen=True)
class Unit:
    """Leaves that are updated together.

    Attributes:
        leaves: their numbers in the state.
        pushed: numbers of the pushed arrays that the update reads.
        by_rows: whether the update may be computed for some of the rows alone; all arrays then have one shape.
    """

    leaves: tuple[int, ...]
    pushed: tuple[int, ...]
    by_rows: bool


@dataclass(frozen=True)
class Update:
    """An update part, sorted.

    Attributes:
        constant: leaves of the state that it leaves as they are.
        everywhere: small leaves that depend on nothing a worker pushes (a counter, a key): each server has its own
            copy, and after the same number of these updates all copies are the same. Where several steps change one,
            see `groups.in_turn`.
        units: the rest.
        reads: of each leaf that it changes, the leaves that the new value depends on.
        scalar_shapes: of the scalars that a worker computes from its gradients alone and pushes to every server.
        shapes: shape and dtype of each leaf of the state.
        pushed_shapes: of each array that can be pushed: gradients and what else the gradient part gives.
    """

    constant: tuple[int, ...]
    everywhere: tuple[int, ...]
    units: tuple[Unit, ...]
    reads: Mapping[int, frozenset[int]]
    scalar_shapes: tuple[jax.ShapeDtypeStruct, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    pushed_shapes: tuple[jax.ShapeDtypeStruct, ...]
    _sorted: _Sorted

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for updates that compute the same."""
        closed = self._sorted.closed
        return str(closed.jaxpr), tuple(np.asarray(x).tobytes() for x in closed.consts)

    def formula(self, leaves: Sequence[int]) -> tuple[Any, ...]:
        """Equal for updates that compute the new values of these leaves, which are everywhere, by the same equations."""
        found = self._sorted
        run = graph.subfunction(found.closed, found.state, [found.new[i] for i in leaves])
        closed = jax.make_jaxpr(lambda *old: run(old))(*self.shapes)
        return str(closed.jaxpr), tuple(np.asarray(x).tobytes() for x in closed.consts)

    @property
    def read_by_scalars(self) -> tuple[int, ...]:
        """The pushed arrays that `worker_scalars` and `late` read."""
        found = self._sorted
        _, reads = graph.needed(found.closed, [*found.scalars, *found.late], set(found.pushed))
        return tuple(i for i, v in enumerate(found.pushed) if v in reads)

    def worker_scalars(self, pushed: Sequence[Any]) -> list[Any]:
        """The scalars, from what a worker computed; traced on the worker, behind the gradient part."""
        found = self._sorted
        return graph.subfunction(found.closed, found.pushed, found.scalars)(pushed)

    def late(self, pushed: Sequence[Any], which: Sequence[int]) -> list[Any]:
        """Results of the update part behind the state, by their place, of those that read no state."""
        found = self._sorted
        return graph.subfunction(found.closed, found.pushed, [found.late[i] for i in which])(pushed)

    def late_reads_state(self, which: int) -> bool:
        """Whether a result of the update part behind the state reads the state, so that no worker can compute it."""
        v = self._sorted.late[which]
        return not graph.is_literal(v) and v in self._sorted.of_state

    def new_leaves(
        self, leaves: Sequence[int], old: dict[int, Any], pushed: dict[int, Any], scalars: Sequence[Any]
    ) -> dict[int, Any]:
        """The new values of leaves that are updated together.

        Args:
            leaves: whole units of this update.
            old: what they are computed from, by number: they themselves, those that are everywhere and the constant
                ones; of units that are all `by_rows` as many rows as there are.
            pushed: the units' pushed arrays, the same rows of them.
            scalars: what `worker_scalars` gave.

        Returns:
            The leaves, by number.
        """
        if not leaves or old[leaves[0]].shape == self.shapes[leaves[0]].shape:
            return self._run(leaves, old, pushed, scalars)
        return self._run_rows(leaves, old, pushed, scalars, old[leaves[0]].shape)

    def _given(self, old: dict[int, Any], pushed: dict[int, Any], scalars: Sequence[Any]) -> dict[Any, Any]:
        found = self._sorted
        return {
            **{found.state[i]: x for i, x in old.items()},
            **{found.pushed[i]: x for i, x in pushed.items()},
            **dict(zip(found.scalars, scalars, strict=True)),
        }

    def _run(
        self, leaves: Sequence[int], old: dict[int, Any], pushed: dict[int, Any], scalars: Sequence[Any]
    ) -> dict[int, Any]:
        given = self._given(old, pushed, scalars)
        wanted = [self._sorted.new[i] for i in leaves]
        results = graph.subfunction(self._sorted.closed, list(given), wanted)(list(given.values()))
        return dict(zip(leaves, results, strict=True))

    def _run_rows(
        self,
        leaves: Sequence[int],
        old: dict[int, Any],
        pushed: dict[int, Any],
        scalars: Sequence[Any],
        shape: tuple[int, ...],
    ) -> dict[int, Any]:
        """Elementwise equations hold for any shape: each is applied to the rows that are there."""
        closed = self._sorted.closed
        known = {**dict(zip(graph.body_of(closed).constvars, closed.consts, strict=True))}
        known |= self._given(old, pushed, scalars)
        wanted = [self._sorted.new[i] for i in leaves]
        equations, _ = graph.needed(closed, wanted, set(known))
        for eqn in equations:
            operands = [graph.value_of(v, known) for v in eqn.invars]
            if eqn.outvars[0].aval.shape:
                known[eqn.outvars[0]] = apply_stored(eqn, operands, shape)
            else:
                known.update(zip(eqn.outvars, graph.apply_equation(closed, eqn, operands), strict=True))

        def whole(v: Any, like: Any) -> Any:
            x = graph.value_of(v, known)
            return jax.numpy.broadcast_to(x, like.shape) if jax.numpy.ndim(x) == 0 else x  # a constant everywhere

        return {i: whole(v, old[i]) for i, v in zip(leaves, wanted, strict=True)}


@dataclass(frozen=True)
class _Sorted:
    """The variables of an update part by what they are.

    Attributes:
        closed: the update part, calls entered: `(state, pushed) -> (new state, late results)`.
        state: its variables of the old state.
        pushed: those of what a worker gives.
        new: what it returns for each leaf of the state.
        late: what else it returns.
        of_state: variables that depend on the state.
        scalars: those that depend on what is pushed alone, have no axes, and are read by what depends on the state.
    """

    closed: Any
    state: tuple[Any, ...]
    pushed: tuple[Any, ...]
    new: tuple[Any, ...]
    late: tuple[Any, ...]
    of_state: frozenset[Any]
    scalars: tuple[Any, ...]


def sort_update(closed: Any, num_leaves: int) -> Update:
    """Sorts an update part.

    Args:
        closed: what `spread_equations.prepared` returned for `(state leaves, pushed arrays) -> (state leaves, others)`.
        num_leaves: how many leaves the state has.

    Returns:
        The leaves by where they are updated, and the functions that update them.
    """
    jaxpr = graph.body_of(closed)
    state, pushed = tuple(jaxpr.invars[:num_leaves]), tuple(jaxpr.invars[num_leaves:])
    new, late = tuple(jaxpr.outvars[:num_leaves]), tuple(jaxpr.outvars[num_leaves:])
    of_state = graph.dependents(closed, state)
    of_arrays = graph.dependents(closed, [v for v in pushed if v.aval.shape])
    found = _Sorted(closed, state, pushed, new, late, frozenset(of_state), ())
    constant = tuple(i for i in range(num_leaves) if new[i] is state[i])
    moving = [i for i in range(num_leaves) if i not in constant]
    scalars = tuple(
        dict.fromkeys(
            v
            for v in _read(closed, [new[i] for i in moving])
            if v in of_arrays
            and v not in of_state
            and not v.aval.shape
            and not jax.numpy.issubdtype(v.aval.dtype, jax.dtypes.prng_key)
        )
    )
    _, reads_of_servers = graph.needed(closed, [new[i] for i in moving], set(scalars))
    scalars = tuple(v for v in scalars if v in reads_of_servers)  # the others are steps on the way to these
    found = _Sorted(closed, state, pushed, new, late, frozenset(of_state), scalars)
    reads = {i: _reads_of(found, new[i]) for i in moving}
    everywhere = _everywhere(found, moving, constant, reads)
    units = _units(found, [i for i in moving if i not in everywhere], reads)
    return Update(
        constant,
        everywhere,
        units,
        {i: found.leaves for i, found in reads.items()},
        _shapes(scalars),
        _shapes(state),
        _shapes(pushed),
        found,
    )


def _shapes(variables: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables)


def _read(closed: Any, wanted: Sequence[Any]) -> list[Any]:
    """Every variable that the way to `wanted` reads, in the order of the equations."""
    equations, _ = graph.needed(closed, wanted, set())
    every = [v for eqn in equations for v in eqn.invars] + list(wanted)
    return [v for v in every if not graph.is_literal(v)]


@dataclass(frozen=True)
class _Reads:
    """What a new leaf is computed from: leaves, pushed arrays, and whether scalars of the worker's."""

    leaves: frozenset[int]
    pushed: frozenset[int]
    scalars: bool


def _reads_of(found: _Sorted, wanted: Any) -> _Reads:
    _, reads = graph.needed(found.closed, [wanted], {*found.scalars, *found.state, *found.pushed})
    return _Reads(
        frozenset(i for i, v in enumerate(found.state) if v in reads),
        frozenset(i for i, v in enumerate(found.pushed) if v in reads),
        any(v in reads for v in found.scalars),
    )


def _everywhere(
    found: _Sorted, moving: list[int], constant: tuple[int, ...], reads: dict[int, _Reads]
) -> tuple[int, ...]:
    def is_small(i: int) -> bool:
        aval = found.state[i].aval
        return math.prod(aval.shape) * aval.dtype.itemsize <= SMALL_BYTES

    chosen = {i for i in moving if is_small(i) and not reads[i].pushed and not reads[i].scalars}
    while outside := {i for i in chosen if not reads[i].leaves <= chosen | set(constant)}:
        chosen -= outside
    return tuple(sorted(chosen))


def _units(found: _Sorted, placed: list[int], reads: dict[int, _Reads]) -> tuple[Unit, ...]:
    """Leaves that read each other, or one pushed array, in one unit."""
    parent: dict[Any, Any] = {}

    def root(x: Any) -> Any:
        while parent.setdefault(x, x) != x:
            x = parent[x]
        return x

    for i in placed:
        for other in [("leaf", j) for j in reads[i].leaves if j in placed] + [("pushed", j) for j in reads[i].pushed]:
            parent[root(other)] = root(("leaf", i))
    members: dict[Any, list[int]] = {}
    for i in placed:
        members.setdefault(root(("leaf", i)), []).append(i)
    units = []
    for leaves in members.values():
        pushed = sorted({j for i in leaves for j in reads[i].pushed})
        units.append(Unit(tuple(leaves), tuple(pushed), _by_rows(found, leaves, pushed)))
    return tuple(units)


def _by_rows(found: _Sorted, leaves: list[int], pushed: list[int]) -> bool:
    """Whether each row of the new leaves is computed from that row of the old ones and of the pushed arrays alone."""
    avals = [found.state[i].aval for i in leaves] + [found.pushed[j].aval for j in pushed]
    shape = avals[0].shape
    if not shape or shape[0] < 2 or any(aval.shape != shape for aval in avals):
        return False
    given = {*found.scalars, *found.state, *found.pushed}
    equations, reads = graph.needed(found.closed, [found.new[i] for i in leaves], given)
    own = {*(found.state[i] for i in leaves), *(found.pushed[j] for j in pushed)}
    others = (v for v in reads if v in given or v in graph.body_of(found.closed).constvars)
    if any(v.aval.shape for v in others if v not in own):
        return False

    def fits(eqn: Any) -> bool:
        ins, outs = [v.aval.shape for v in eqn.invars], [v.aval.shape for v in eqn.outvars]
        if not any(ins) and not any(outs):
            return True
        if eqn.primitive.name in graph.RESHAPING:
            return (ins[0] == outs[0] or not ins[0]) and outs == [shape]
        return eqn.primitive.name in ELEMENTWISE and outs == [shape] and all(s in ((), shape) for s in ins)

    return all(map(fits, equations))
