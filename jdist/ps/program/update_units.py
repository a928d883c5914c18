"""Finds where each leaf of a state can be updated, from the traced update itself.

A step's update part is a jaxpr from the old state and what a worker computed to the new state. From its dependences
follow the *units*: leaves that are updated together (a parameter, its momentum, its average), and so live on one
server. A unit with an elementwise update may be cut by rows. What needs a whole gradient but no state (its norm, for
clipping) is a scalar, which the worker computes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jdist.jaxpr import graph
from jdist.jaxpr.elementwise import ELEMENTWISE, apply_stored

SMALL_BYTES = 64 << 10


@dataclass(frozen=True)
class Unit:
    """Leaves that are updated together."""

    leaves: tuple[int, ...]  # their numbers in the state
    pushed: tuple[int, ...]  # numbers of the pushed arrays that the update reads
    by_rows: bool  # the update may be computed for some rows alone; all arrays then have one shape


@dataclass(frozen=True, eq=False)
class Update:
    """A step's update part, and the places of its leaves."""

    # as `elementwise.prepared` returns it: `(state, pushed arrays) -> (state, late results)`
    closed: Any
    num_leaves: int

    @functools.cached_property
    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of each leaf of the state."""
        return _shapes(self._state)

    @functools.cached_property
    def pushed_shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of each array that can be pushed: gradients and what else the gradient part computes."""
        return _shapes(self._pushed)

    @functools.cached_property
    def scalar_shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of the scalars that a worker computes from its gradients alone and pushes to every server."""
        return _shapes(self._scalars)

    @functools.cached_property
    def constant(self) -> tuple[int, ...]:
        """Leaves of the state that the update does not change."""
        return tuple(i for i, (new, old) in enumerate(zip(self._new, self._state, strict=True)) if new is old)

    @functools.cached_property
    def reads(self) -> Mapping[int, frozenset[int]]:
        """For each leaf that the update changes, the leaves that its new value depends on."""
        return {i: frozenset(_places(self._state, reads)) for i, reads in self._reads.items()}

    @functools.cached_property
    def everywhere(self) -> tuple[int, ...]:
        """Small leaves that depend on no pushed array (a counter, a key)."""
        # Each server has its own copy, and after the same number of these updates all copies are
        # the same. If several steps change one, see `layout.in_turn`.
        sizes = [math.prod(shape.shape) * shape.dtype.itemsize for shape in self.shapes]
        chosen = {
            i
            for i, reads in self._reads.items()
            if sizes[i] <= SMALL_BYTES and not any(v in reads for v in (*self._pushed, *self._scalars))
        }
        while outside := {i for i in chosen if not self.reads[i] <= chosen | set(self.constant)}:
            chosen -= outside
        return tuple(sorted(chosen))

    @functools.cached_property
    def units(self) -> tuple[Unit, ...]:
        """The other leaves that change: those that read each other, or one pushed array, are in one unit."""
        placed = [i for i in self.reads if i not in self.everywhere]
        pushed = {i: _places(self._pushed, self._reads[i]) for i in placed}
        first_reader: dict[int, int] = {}
        links = [(i, j) for i in placed for j in self.reads[i]]
        links += [(i, first_reader.setdefault(j, i)) for i in placed for j in pushed[i]]
        units = []
        for leaves in connected(placed, links):
            read = tuple(sorted({j for i in leaves for j in pushed[i]}))
            units.append(Unit(leaves, read, self._is_by_rows(leaves, read)))
        return tuple(units)

    @property
    def identity(self) -> tuple[Any, ...]:
        """A value that is equal for updates that compute the same."""
        return _identity(self.closed)

    def formula(self, leaves: Sequence[int]) -> tuple[Any, ...]:
        """Returns a value that is equal for updates that compute these leaves, which are everywhere, by equal equations."""
        run = graph.subfunction(self.closed, self._state, [self._new[i] for i in leaves])
        return _identity(jax.make_jaxpr(lambda *old: run(old))(*self.shapes))

    @property
    def read_by_scalars(self) -> tuple[int, ...]:
        """The pushed arrays that `worker_scalars` and `late` read."""
        _, reads = graph.needed(self.closed, [*self._scalars, *self._late], set(self._pushed))
        return _places(self._pushed, reads)

    def worker_scalars(self, pushed: Sequence[Any]) -> list[Any]:
        """Computes the scalars from what a worker computed; traced on the worker, after the gradient part."""
        return graph.subfunction(self.closed, self._pushed, self._scalars)(pushed)

    def late(self, pushed: Sequence[Any], which: Sequence[int]) -> list[Any]:
        """Computes late results, by their place, that read no state."""
        return graph.subfunction(self.closed, self._pushed, [self._late[i] for i in which])(pushed)

    def late_reads_state(self, which: int) -> bool:
        """Returns whether a late result reads the state, so that no worker can compute it."""
        return graph.is_in(self._late[which], self._of_state)

    def new_leaves(
        self, leaves: Sequence[int], old: dict[int, Any], pushed: dict[int, Any], scalars: Sequence[Any]
    ) -> dict[int, Any]:
        """Computes new values, by number, of leaves in full units of this update."""
        # `old` are their inputs, by number: the leaves, the everywhere ones and the constant ones.
        # If all units are `by_rows`, `old` and `pushed` may hold any of the rows. `scalars` comes
        # from `worker_scalars`.
        values = {self._state[i]: x for i, x in old.items()}
        values |= {self._pushed[j]: x for j, x in pushed.items()}
        values |= dict(zip(self._scalars, scalars, strict=True))
        wanted = [self._new[i] for i in leaves]
        if leaves and old[leaves[0]].shape != self.shapes[leaves[0]].shape:
            results = self._run_rows(wanted, values, old[leaves[0]].shape)
        else:
            results = graph.subfunction(self.closed, list(values), wanted)(list(values.values()))
        return dict(zip(leaves, results, strict=True))

    def _run_rows(self, wanted: Sequence[Any], values: dict[Any, Any], shape: tuple[int, ...]) -> list[Any]:
        """Computes rows of a unit: elementwise equations hold for any shape, so each is applied to the rows there are."""
        known = {**dict(zip(graph.body_of(self.closed).constvars, self.closed.consts, strict=True)), **values}
        equations, _ = graph.needed(self.closed, wanted, set(known))
        for eqn in equations:
            operands = [graph.value_of(v, known) for v in eqn.invars]
            if eqn.outvars[0].aval.shape:
                known[eqn.outvars[0]] = apply_stored(eqn, operands, shape)
            else:
                known.update(zip(eqn.outvars, graph.apply_equation(self.closed, eqn, operands), strict=True))
        # What is a scalar here is one constant in all rows.
        return [jax.numpy.broadcast_to(graph.value_of(v, known), shape) for v in wanted]

    @functools.cached_property
    def _state(self) -> tuple[Any, ...]:
        return tuple(graph.body_of(self.closed).invars[: self.num_leaves])

    @functools.cached_property
    def _pushed(self) -> tuple[Any, ...]:
        return tuple(graph.body_of(self.closed).invars[self.num_leaves :])

    @functools.cached_property
    def _new(self) -> tuple[Any, ...]:
        return tuple(graph.body_of(self.closed).outvars[: self.num_leaves])

    @functools.cached_property
    def _late(self) -> tuple[Any, ...]:
        return tuple(graph.body_of(self.closed).outvars[self.num_leaves :])

    @functools.cached_property
    def _of_state(self) -> set[Any]:
        """The variables that depend on the state."""
        return graph.dependents(self.closed, self._state)

    @functools.cached_property
    def _scalars(self) -> tuple[Any, ...]:
        """The variables without axes that depend on pushed arrays alone and are read by what depends on the state."""
        moving = [v for i, v in enumerate(self._new) if i not in self.constant]
        of_arrays = graph.dependents(self.closed, [v for v in self._pushed if v.aval.shape])
        equations, _ = graph.needed(self.closed, moving, set())
        candidates = dict.fromkeys(
            v
            for v in [*(v for eqn in equations for v in eqn.invars), *moving]
            if graph.is_in(v, of_arrays)
            and v not in self._of_state
            and not v.aval.shape
            and not jax.numpy.issubdtype(v.aval.dtype, jax.dtypes.prng_key)
        )
        _, read_by_servers = graph.needed(self.closed, moving, set(candidates))
        return tuple(v for v in candidates if v in read_by_servers)  # the others are steps on the way to these

    @functools.cached_property
    def _reads(self) -> dict[int, set[Any]]:
        """For each leaf that changes, the variables of the state, of pushed arrays and of scalars that it is computed from."""
        given = {*self._scalars, *self._state, *self._pushed}
        moving = [i for i in range(self.num_leaves) if i not in self.constant]
        return {i: graph.needed(self.closed, [self._new[i]], given)[1] & given for i in moving}

    def _is_by_rows(self, leaves: Sequence[int], pushed: Sequence[int]) -> bool:
        """Returns whether each row of the new leaves depends only on that row of the old ones and of the pushed arrays."""
        own = {*(self._state[i] for i in leaves), *(self._pushed[j] for j in pushed)}
        shape = self.shapes[leaves[0]].shape
        if not shape or shape[0] < 2 or any(v.aval.shape != shape for v in own):
            return False
        given = {*self._scalars, *self._state, *self._pushed}
        equations, reads = graph.needed(self.closed, [self._new[i] for i in leaves], given)
        others = (v for v in reads - own if v in given or v in graph.body_of(self.closed).constvars)
        if any(v.aval.shape for v in others):
            return False

        def fits(eqn: Any) -> bool:
            ins, outs = [v.aval.shape for v in eqn.invars], [v.aval.shape for v in eqn.outvars]
            if not any(ins) and not any(outs):
                return True
            if eqn.primitive.name in graph.RESHAPING:
                return (ins[0] == outs[0] or not ins[0]) and outs == [shape]
            return eqn.primitive.name in ELEMENTWISE and outs == [shape] and all(s in ((), shape) for s in ins)

        return all(map(fits, equations))


def connected(members: Iterable[int], links: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Sorts members into sets that links join; ignores links of non-members."""
    sets = {i: {i} for i in members}
    for i, j in links:
        if i in sets and j in sets and sets[i] is not sets[j]:
            sets[i] |= sets[j]
            sets.update(dict.fromkeys(sets[j], sets[i]))
    return list({id(found): tuple(sorted(found)) for found in sets.values()}.values())


def _places(variables: Sequence[Any], among: set[Any]) -> tuple[int, ...]:
    return tuple(i for i, v in enumerate(variables) if v in among)


def _shapes(variables: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables)


def _identity(closed: Any) -> tuple[Any, ...]:
    return str(closed.jaxpr), tuple(np.asarray(x).tobytes() for x in closed.consts)
