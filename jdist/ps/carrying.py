"""What a step carries besides the gradient (a counter, a running mean), so that no worker writes over what others wrote.

A worker computes such a leaf's new value from the old one that it has pulled, which may be old by now. Where the traced step
shows that `new = slope * old + offset`, and neither number depends on the leaf, the worker pushes the offset, and the server
applies the same rule to what it has: a counter counts everything, and a mean takes every batch in, once, as if the workers had
taken turns. (Adding `new - old` would do for a counter. A running mean would be pulled back several times for each new batch,
and with many workers swing beyond all bounds.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jdist import dataflow
from jdist.boundary import Split
from jdist.transforms.spread_equations import RESHAPING

PyTree = Any
Slope = Any  # a number of the program, or an array that the worker computes; no axes, or those of the leaf


@dataclasses.dataclass(frozen=True)
class Linear:
    """A leaf that becomes `slope * old + offset`.

    Attributes:
        leaf: its number in the state.
        place: its place among the leaves that the step carries.
        slope: of one microbatch; None if only the worker knows it.
    """

    leaf: int
    place: int
    slope: float | None


@dataclasses.dataclass(frozen=True)
class Carrying:
    """What the gradient part of a step carries, and which of it has a slope.

    Slopes that only the worker knows are carried themselves: a further leaf each beside the state, 1 at first, which every
    microbatch multiplies by its own.

    Attributes:
        linear: the leaves that have one.
        shapes: of those slopes that are carried.
        microbatches: of a closure.
    """

    linear: tuple[Linear, ...] = ()
    shapes: tuple[Any, ...] = ()
    microbatches: int = 1

    def begun(self, state: PyTree) -> PyTree:
        """A state as the gradient part takes it."""
        return state, [jnp.ones(shape.shape, shape.dtype) for shape in self.shapes]

    def pushed(self, state: PyTree, carried: Sequence[Any]) -> list[Any]:
        """What can be pushed: the new values, then offsets, then slopes.

        Args:
            state: the old state's leaves.
            carried: what the gradient part has carried: new values, then slopes.
        """
        new, slopes = list(carried[: len(carried) - len(self.shapes)]), list(carried[len(carried) - len(self.shapes) :])
        offsets = []
        for found, slope in zip(self.linear, self._slopes(slopes), strict=True):
            kept, value = _times(slope, state[found.leaf]), _wide(new[found.place])
            if jnp.issubdtype(kept.dtype, jnp.floating):  # infinity less itself is no number
                offset = jnp.where(jnp.isfinite(kept), value - kept, value)
                offsets.append(jnp.where(value == kept, jnp.zeros_like(value), offset))
            else:
                offsets.append(value - kept)
        return [*new, *offsets, *slopes]

    def applied(self, state: Sequence[Any], new: Sequence[Any], pushed: Sequence[Any]) -> list[Any]:
        """The new leaves of a state.

        Args:
            state: the old leaves, as the server has them.
            new: the new leaves as the worker has them.
            pushed: offsets, then slopes.
        """
        leaves, n = list(new), len(self.linear)
        for found, offset, slope in zip(self.linear, pushed[:n], self._slopes(pushed[n:]), strict=True):
            old = state[found.leaf]
            leaves[found.leaf] = (_times(slope, old) + offset).astype(old.dtype)
        return leaves

    def _slopes(self, computed: Sequence[Any]) -> list[Slope]:
        """Of a closure, for each of `linear`."""
        rest = iter(computed)
        return [next(rest) if x.slope is None else x.slope**self.microbatches for x in self.linear]


def find_carrying(
    parts: Split, state: PyTree, batch: PyTree, others: PyTree, *, num_replicas: int, microbatches: int
) -> tuple[Split, Carrying]:
    """Finds what a step carries by a slope; called where the replica axes are bound.

    Args:
        parts: the step as one microbatch sees it.
        state: the state; arrays, or structs of its leaves.
        batch: a microbatch; the same.
        others: further arguments; the same.
        num_replicas: how many replicas there are.
        microbatches: of a closure.

    Returns:
        The step, to be called with what `Carrying.begun` returns, and what it carries.
    """
    leaves = jax.tree.leaves(state)
    rules: list[tuple[Linear, Callable[[Sequence[Any]], Slope], Any]] = []
    if any(_is_number(leaves[i]) for i in parts.carried):
        counts = jax.eval_shape(parts.counts, state, batch, others, jnp.int32(0))
        flat = _flat(parts, (state, batch, others, jnp.int32(0), counts))
        values = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in dataflow.body_of(flat).invars]
        for place, leaf in enumerate(parts.carried):
            rule = _Rule(flat, leaf, place, num_replicas)
            known, shape = rule.of_program(values) if _is_number(leaves[leaf]) else (None, None)
            if known is not None or shape is not None:
                rules.append((Linear(leaf, place, known), rule, shape))
    computed = [(rule, shape) for found, rule, shape in rules if found.slope is None]
    carrying = Carrying(tuple(found for found, _, _ in rules), tuple(shape for _, shape in computed), microbatches)

    def counts_of(state: PyTree, *more: Any) -> list[jax.Array]:
        return parts.counts(state[0], *more)

    def gradients(state: PyTree, *more: Any) -> Any:
        cuts, carried, crossing, outputs = parts.gradients(state[0], *more)
        values = jax.tree.leaves((state[0], *more)) if computed else []
        slopes = [
            before * jnp.broadcast_to(rule(values), shape.shape).astype(shape.dtype)
            for before, (rule, shape) in zip(state[1], computed, strict=True)
        ]
        return cuts, [*carried, *slopes], crossing, outputs

    carried = (*parts.carried, *range(len(leaves), len(leaves) + len(computed)))
    return dataclasses.replace(parts, carried=carried, counts=counts_of, gradients=gradients), carrying


def _is_number(leaf: Any) -> bool:
    """Whether a leaf is of real numbers, no key and no flag."""
    return jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.issubdtype(leaf.dtype, jnp.integer)


def _wide(x: Any) -> Any:
    """In at least 32 bits, if it is of floating-point numbers: half precision would round an offset away."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _times(slope: Slope, old: Any) -> Any:
    """The part of the old value that stays; nothing of one that is forgotten, infinity as well."""
    old = _wide(old)
    if isinstance(slope, float | int):
        return old * jnp.asarray(slope).astype(old.dtype) if slope != 1 else old
    return jnp.where(slope == 0, jnp.zeros_like(old), old * slope)


def _flat(parts: Split, arguments: Any) -> Any:
    """The jaxpr from a microbatch's arguments to what it carries, and to nothing else, with calls entered."""
    leaves, treedef = jax.tree.flatten(arguments)
    every = jax.make_jaxpr(lambda *values: parts.gradients(*jax.tree.unflatten(treedef, values))[1])(*leaves)
    run = dataflow.subfunction(every, dataflow.body_of(every).invars, dataflow.body_of(every).outvars)
    few = jax.make_jaxpr(lambda *values: run(values))(*leaves)
    return jax.make_jaxpr(lambda *values: dataflow.inlined(few, values, {}))(*leaves)


class _NotLinearError(Exception):
    """What is computed from the old value is no slope times it, and something that does not depend on it."""


class _Rule:
    """How a new leaf follows from the old one.

    Args:
        closed: the jaxpr from a microbatch's arguments, the state's leaves first, to what is carried.
        leaf: the leaf's number in the state.
        place: its place among what is carried.
        num_replicas: how many replicas there are.
    """

    def __init__(self, closed: Any, leaf: int, place: int, num_replicas: int):
        jaxpr = dataflow.body_of(closed)
        self._closed, self._n = closed, num_replicas
        self._old, self._new = jaxpr.invars[leaf], jaxpr.outvars[place]
        self._made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self._constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        depends = dataflow.dependents(closed, [self._old])
        equations, _ = dataflow.needed(closed, [self._new], {self._old})
        self._depends = depends
        self._path = [eqn for eqn in equations if any(v in depends for v in eqn.invars if not dataflow.is_literal(v))]

    def of_program(self, values: Sequence[Any]) -> tuple[float | None, Any]:
        """The slope, if it is a number of the program; or the shape of the one that a worker computes; or neither.

        Args:
            values: structs of the arguments.
        """
        if dataflow.is_literal(self._new) or self._new not in self._depends:
            return None, None
        found: list[Slope] = []

        def run(*values: Any) -> Any:
            found.append(self(values))
            return () if isinstance(found[0], float | int) else found[0]

        try:
            shape = jax.eval_shape(run, *values)
        except (_NotLinearError, OverflowError):  # a number below nothing times an unsigned one
            return None, None
        dtype, slope = self._old.aval.dtype, found[0]
        if not isinstance(slope, float | int):
            wide = dtype if jnp.issubdtype(dtype, jnp.integer) else jnp.promote_types(dtype, jnp.float32)
            return None, jax.ShapeDtypeStruct(shape.shape, wide)
        # Powers of a whole number need not be a number of its kind; of 1 and -1 they are.
        is_kept = abs(slope) == 1 if jnp.issubdtype(dtype, jnp.integer) else slope != 0
        return (slope, None) if is_kept else (None, None)

    def __call__(self, values: Sequence[Any]) -> Slope:
        """The slope, for values of the arguments.

        Raises:
            _NotLinearError: there is none.
        """
        known: dict[Any, Slope] = {self._old: 1}
        for eqn in self._path:
            slopes = [None if dataflow.is_literal(v) else known.get(v) for v in eqn.invars]
            if eqn.primitive.name in ("psum", "psum_invariant") and dataflow.makes_alike(eqn):
                known.update(
                    (v, self._total(eqn, slope))
                    for v, slope in zip(eqn.outvars, slopes, strict=True)
                    if slope is not None
                )
            else:
                known[eqn.outvars[0]] = self._slope(eqn, slopes, values)
        return known[self._new]

    def _total(self, eqn: Any, slope: Slope) -> Slope:
        """Of a sum over the replicas, all of which have the leaf."""
        return slope * self._n if isinstance(slope, float | int) else jax.lax.psum(slope, eqn.params["axes"])

    def _slope(self, eqn: Any, slopes: Sequence[Any], values: Sequence[Any]) -> Slope:
        """Of an equation's result, from those of its operands; None for those that do not depend on the leaf."""
        name, out = eqn.primitive.name, eqn.outvars[0].aval
        alone = slopes[0] is not None and all(s is None for s in slopes[1:])
        first: Any = next(s for s in slopes if s is not None)
        match name:
            case "add" | "add_any":
                return sum(s for s in slopes if s is not None)
            case "sub":
                left, right = (0 if s is None else s for s in slopes)
                return left - right
            case "neg":
                return -first
            case "copy" | "copy_p":
                return first
            case "mul" if sum(s is None for s in slopes) == 1:
                (factor,) = (v for v, s in zip(eqn.invars, slopes, strict=True) if s is None)
                return first * self._value(factor, values)
            case "div" if alone and jnp.issubdtype(out.dtype, jnp.floating) and self._constant(eqn.invars[1]) != 0:
                return first / self._value(eqn.invars[1], values)
            case "convert_element_type" if _same_kind(eqn.invars[0].aval.dtype, out.dtype):
                is_number = isinstance(first, float | int) or jnp.issubdtype(out.dtype, jnp.floating)
                return first if is_number else jnp.asarray(first).astype(out.dtype)
            case "scatter-add" if alone:
                return first
            case "select_n" if slopes[0] is None:
                return self._selected(eqn, [0 if s is None else s for s in slopes[1:]], values)
            case _ if name in RESHAPING and alone and eqn.invars[0].aval.size == out.size:
                is_number = isinstance(first, float | int) or not jnp.ndim(first)
                return first if is_number else jnp.reshape(first, out.shape)
        raise _NotLinearError

    def _selected(self, eqn: Any, slopes: list[Slope], values: Sequence[Any]) -> Slope:
        if all(isinstance(s, float | int) and s == slopes[0] for s in slopes):
            return slopes[0]
        out, which = eqn.outvars[0].aval, self._value(eqn.invars[0], values)
        if isinstance(which, bool | int):
            return slopes[which]
        shape = out.shape if any(jnp.ndim(x) for x in (which, *slopes)) else ()
        return jax.lax.select_n(
            which, *(jnp.broadcast_to(_wide(jnp.asarray(s).astype(out.dtype)), shape) for s in slopes)
        )

    def _value(self, v: Any, values: Sequence[Any]) -> Any:
        """The value of what does not depend on the leaf; a number if it is one of the program."""
        constant = self._constant(v)
        if constant is not None:
            return constant
        return dataflow.subfunction(self._closed, dataflow.body_of(self._closed).invars, [v])(values)[0]

    def _constant(self, v: Any) -> Any:
        found = v.val if dataflow.is_literal(v) else self._constants.get(v)
        if found is not None and not isinstance(found, jax.core.Tracer) and np.ndim(found) == 0:
            wide = np.float64 if jnp.issubdtype(v.aval.dtype, jnp.floating) else v.aval.dtype
            return np.asarray(found, v.aval.dtype).astype(wide).item()
        eqn = None if dataflow.is_literal(v) else self._made_by.get(v)
        if eqn is not None and eqn.primitive.name in ("broadcast_in_dim", "convert_element_type"):
            same = eqn.primitive.name == "broadcast_in_dim" or _same_kind(eqn.invars[0].aval.dtype, v.aval.dtype)
            return self._constant(eqn.invars[0]) if same else None
        return None


def _same_kind(a: Any, b: Any) -> bool:
    return any(jnp.issubdtype(a, kind) and jnp.issubdtype(b, kind) for kind in (jnp.floating, jnp.integer))
