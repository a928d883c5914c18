"""Affine rules of state leaves, read from a traced step: `new = slope * old + offset`.

A counter has the slope 1, a moving average its decay. Microbatches or workers that each computed such a leaf from one
old value can then be brought together; values of any other kind have nothing in common.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jdist.core.collective_marks import collective_of
from jdist.jaxpr import graph, variation
from jdist.support.arrays import promote_types

_ADDING = ("add", "add_any", "sub", "scatter-add")
_KEEPING = (
    "neg",
    "copy",
    "copy_p",
    "optimization_barrier",
    "stop_gradient",
    "convert_element_type",
    "transpose",
    *graph.RESHAPING,
)  # whole numbers
# What keeps the degree of its operands, if all have one.
_LINEAR = frozenset(
    {*_KEEPING, "add", "add_any", "sub", "select_n", "concatenate", "slice", "split", "stack", "psum", "reduce_sum"}
)
_SIGNS = frozenset({"eq", "ne", "gt", "ge", "lt", "le"})
Slope = Any  # a number of the program, or an array computed when the step runs; no axes, or those of the leaf


# Averaging over microbatches or replicas changes a number that is not a mean of rows.
SAY_WHAT_IT_IS = (
    'Combine it first, by its kind: `jdist.all_reduce(x, "sum")` for a sum over its rows, "max" for a maximum; for a '
    'mean `jdist.aggregate(new, "mean")` of the new value.'
)


class _NotAffineError(Exception):
    """The new value is not a slope times the old one plus something that does not depend on it."""


class AffineRule:
    """The slope of one new state leaf in its old value."""

    def __init__(
        self,
        closed: Any,
        old: Any,  # the argument that holds the old value
        new: Any,  # the variable that holds the new value
        sizes: tuple[int, int],  # number of replicas, and of microbatches of each
        # variables with known values when the slope is computed; None: the arguments
        given: Sequence[Any] | None = None,
        rows: Sequence[Any] = (),  # the arguments that hold a replica's rows
    ):
        arguments = list(graph.body_of(closed).invars if given is None else given)
        self._flat = _entered(closed, arguments, new)
        jaxpr = graph.body_of(self._flat)
        self._sizes, self._old, self._new = sizes, jaxpr.invars[arguments.index(old)], jaxpr.outvars[0]
        self._made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self._constants = dict(zip(jaxpr.constvars, self._flat.consts, strict=True))
        self._depends = graph.dependents(self._flat, [self._old])
        own = [jaxpr.invars[arguments.index(v)] for v in rows]
        self._num_rows = next((v.aval.shape[0] for v in own if v.aval.shape), 1)
        self._of_rows, self._own = graph.dependents(self._flat, own), variation.of_one_microbatch(self._flat, own)
        equations, _ = graph.needed(self._flat, [self._new], {self._old})
        self._path = [
            eqn for eqn in equations if any(v in self._depends for v in eqn.invars if not graph.is_literal(v))
        ]

    def of_program(self) -> float | jax.ShapeDtypeStruct | None:
        """Finds the slope: a number of the program, 0 where the old value plays no part; the shape of a computed one; None."""
        if graph.is_literal(self._new) or self._new not in self._depends:
            return 0
        slopes: list[Slope] = []

        def run(*values: Any) -> Any:
            slopes.append(self(values))
            return () if isinstance(slopes[0], float | int) else slopes[0]

        jaxpr = graph.body_of(self._flat)
        try:
            shape = jax.eval_shape(run, *map(graph.struct_of, jaxpr.invars))
        except (_NotAffineError, OverflowError):  # a negative number times an unsigned one
            return None
        dtype, slope = self._old.aval.dtype, slopes[0]
        if isinstance(slope, float | int):
            return slope
        wide = dtype if jnp.issubdtype(dtype, jnp.integer) else promote_types(dtype, jnp.float32)
        return jax.ShapeDtypeStruct(shape.shape, wide)

    @property
    def counts_rows(self) -> bool:
        """Returns whether all that is added to the old value is whole by its making and a sum over rows, which no mean is."""
        return all(
            eqn.primitive.name in (*_ADDING, *_KEEPING)
            and all(self._is_whole(v) and self._is_sum(v) for v in self._others(eqn))
            and (eqn.primitive.name != "scatter-add" or self._adds_row_by_row(eqn))
            for eqn in self._path
        )

    def _is_sum(self, v: Any) -> bool:
        return not graph.is_in(v, self._own) or self._constant(v) == 0 or self._degree(v) == 1

    @property
    def is_mean(self) -> bool:
        """Returns whether the new value is made of means over the rows, seen in the program, and of nothing else of theirs."""
        return self._degree(self._new) == 0

    def _degree(self, v: Any) -> int | None:
        """Finds how a value grows with the number of rows: 0 for a mean, 1 for a sum; None: it cannot be seen."""
        return self._degrees[v] if graph.is_in(v, self._of_rows) else 0

    @functools.cached_property
    def _degrees(self) -> dict[Any, int | None]:
        """The degrees of all values that depend on rows."""
        jaxpr = graph.body_of(self._flat)
        # In order: each looks up those before it.
        self._degrees = degrees = dict[Any, int | None](dict.fromkeys(v for v in jaxpr.invars if v in self._of_rows))
        for eqn in jaxpr.eqns:
            for i, v in enumerate(eqn.outvars):
                if v in self._of_rows:
                    degree = self._degree_by(eqn, i)
                    degrees[v] = 0 if degree is None and v not in self._own else degree  # a combined value
        return degrees

    def _degree_by(self, eqn: Any, result: int) -> int | None:
        name, collective = eqn.primitive.name, collective_of(eqn)
        degrees: list[Any] = list(map(self._degree, eqn.invars))
        if collective is not None:
            return degrees[result] if collective.kind == "value" and collective.op in ("sum", "mean") else None
        if name == "scatter-add":
            return 1 if self._adds_row_by_row(eqn) else None
        if None in degrees:
            adds_rows = name in ("reduce_sum", "dot_general") and self._num_terms(eqn) % self._num_rows == 0
            return 1 if adds_rows else None
        if not any(degrees):
            return 0  # made of means alone
        constants = list(map(self._constant, eqn.invars))
        if (name == "div" and degrees[0] == 1 and constants[1]) or (name == "mul" and 1 in degrees and any(constants)):
            divisor = constants[1] if name == "div" else 1 / (constants[0] or constants[1])
            return 0 if self._is_number_of_terms(divisor, eqn) else 1
        if name in ("mul", "div", "dot_general"):
            return degrees[0] - degrees[1] if name == "div" else degrees[0] + degrees[1]
        if name in _SIGNS and 0 in constants:
            return 0
        # A guard against the division by zero leaves a sum what it is.
        guards = {"select_n": math.inf, "max": 1, "add": 1e-3}
        is_guard = [c is not None and abs(c) <= guards.get(name, 0) for c in constants]
        cases = slice(name == "select_n", None)
        found = {d for d, is_guard in list(zip(degrees, is_guard, strict=True))[cases] if not is_guard}
        keeps = (name in _LINEAR or name == "max") and len(found) == 1 and (name != "select_n" or degrees[0] == 0)
        return found.pop() if keeps else None

    def _is_number_of_terms(self, divisor: float, eqn: Any) -> bool:
        """Returns whether what divides a sum is the number of rows or of the sum's terms, or one less, as in a variance."""
        number = round(divisor)
        if not number or abs(divisor - number) > 1e-6 * number:
            return False
        while (before := [x for x in eqn.invars if self._degree(x) == 1]) and eqn.primitive.name != "scatter-add":
            eqn = self._made_by[before[0]]
        if eqn.primitive.name not in ("reduce_sum", "dot_general", "scatter-add"):
            return False
        terms = self._num_rows if eqn.primitive.name == "scatter-add" else self._num_terms(eqn)
        return number in (terms, terms - 1) or (number % self._num_rows == 0 and terms % number == 0)

    def _num_terms(self, eqn: Any) -> int:
        """Counts the terms of each sum that an equation makes."""
        axes = eqn.params["dimension_numbers"][0][0] if eqn.primitive.name == "dot_general" else eqn.params["axes"]
        return math.prod(eqn.invars[0].aval.shape[axis] for axis in axes)

    def _adds_row_by_row(self, eqn: Any) -> bool:
        """Returns whether a `scatter-add` adds a value for each row, or sums rows at places that they do not choose."""
        _, indices, updates = eqn.invars[:3]
        if graph.is_in(indices, self._of_rows):
            return math.prod(indices.aval.shape[:-1]) % self._num_rows == 0
        return not graph.is_in(updates, self._of_rows) or self._degree(updates) == 1

    def _others(self, eqn: Any) -> list[Any]:
        """Lists the operands of an equation that do not depend on the leaf, indices left out."""
        operands = [eqn.invars[0], *eqn.invars[2:]] if eqn.primitive.name == "scatter-add" else eqn.invars
        return [v for v in operands if graph.is_literal(v) or v not in self._depends]

    def _is_whole(self, v: Any) -> bool:
        if jnp.issubdtype(v.aval.dtype, jnp.integer) or v.aval.dtype == jnp.bool_:
            return True
        if (constant := self._constant(v)) is not None:
            return float(constant).is_integer()
        eqn = None if graph.is_literal(v) else self._made_by.get(v)
        if eqn is None or eqn.primitive.name not in (
            *_ADDING,
            *_KEEPING,
            "mul",
            "reduce_sum",
            "dot_general",
            "select_n",
        ):
            return False
        operands = eqn.invars[1:] if eqn.primitive.name == "select_n" else eqn.invars
        return all(map(self._is_whole, operands))

    def __call__(self, values: Sequence[Any]) -> Slope:
        """Computes the slope from the values of the given variables, or raises `_NotAffineError`."""
        known: dict[Any, Slope] = {self._old: 1}
        for eqn in self._path:
            slopes = [None if graph.is_literal(v) else known.get(v) for v in eqn.invars]
            own, op = collective_of(eqn), eqn.primitive.name
            if own is not None or (op in ("psum", "psum_invariant") and variation.makes_alike(eqn)):
                for v, slope in zip(eqn.outvars, slopes, strict=True):
                    if slope is not None:
                        known[v] = self._combined("sum" if own is None else own.op, eqn, slope)
            else:
                known[eqn.outvars[0]] = self._slope(eqn, slopes, values)
        return known[self._new]

    def _combined(self, op: str, eqn: Any, slope: Slope) -> Slope:
        """Computes the slope of what all replicas together made of the leaf."""
        replicas, microbatches = self._sizes
        if op not in ("mean", "sum"):
            raise _NotAffineError
        if isinstance(slope, float | int):
            of_jdist = collective_of(eqn) is not None
            return slope if op == "mean" else slope * replicas * (microbatches if of_jdist else 1)
        if microbatches > 1:  # the slopes of the other microbatches are not known
            raise _NotAffineError
        bodies = graph.nested_jaxprs(eqn)
        axes = eqn.params["axes"] if not bodies else _axes_of(bodies[0])
        total = jax.lax.psum(slope, axes) if axes else slope
        return total if op == "sum" else total / replicas

    def _slope(self, eqn: Any, slopes: Sequence[Any], values: Sequence[Any]) -> Slope:
        """Computes the slope of an equation's result from its operands'; None for those that do not depend on the leaf."""
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
            case "copy" | "copy_p" | "optimization_barrier" | "stop_gradient":
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
            case _ if name in graph.RESHAPING and alone and eqn.invars[0].aval.size == out.size:
                is_number = isinstance(first, float | int) or not jnp.ndim(first)
                return first if is_number else jnp.reshape(first, out.shape)
        raise _NotAffineError

    def _selected(self, eqn: Any, slopes: list[Slope], values: Sequence[Any]) -> Slope:
        if all(isinstance(s, float | int) and s == slopes[0] for s in slopes):
            return slopes[0]
        out, which = eqn.outvars[0].aval, self._value(eqn.invars[0], values)
        if isinstance(which, bool | int):
            return slopes[which]
        shape = out.shape if any(jnp.ndim(x) for x in (which, *slopes)) else ()
        return jax.lax.select_n(
            which, *(jnp.broadcast_to(wide(jnp.asarray(s).astype(out.dtype)), shape) for s in slopes)
        )

    def _value(self, v: Any, values: Sequence[Any]) -> Any:
        """Computes what does not depend on the leaf; a number if it is one of the program."""
        constant = self._constant(v)
        if constant is not None:
            return constant
        return graph.subfunction(self._flat, graph.body_of(self._flat).invars, [v])(values)[0]

    def _constant(self, v: Any) -> Any:
        value = v.val if graph.is_literal(v) else self._constants.get(v)
        if value is not None and not isinstance(value, jax.core.Tracer) and np.ndim(value) == 0:
            dtype = np.float64 if jnp.issubdtype(v.aval.dtype, jnp.floating) else v.aval.dtype
            return np.asarray(value, v.aval.dtype).astype(dtype).item()
        eqn = None if graph.is_literal(v) else self._made_by.get(v)
        if eqn is not None and eqn.primitive.name in ("broadcast_in_dim", "convert_element_type"):
            same = eqn.primitive.name == "broadcast_in_dim" or _same_kind(eqn.invars[0].aval.dtype, v.aval.dtype)
            return self._constant(eqn.invars[0]) if same else None
        if eqn is not None and eqn.primitive.name == "sub":  # the divisor of a variance
            left, right = map(self._constant, eqn.invars)
            return None if left is None or right is None else left - right
        if eqn is not None and eqn.primitive.name == "mul" and jnp.issubdtype(v.aval.dtype, jnp.integer):
            return 0 if 0 in map(self._constant, eqn.invars) else None
        return None


def wide(x: Any) -> Any:
    """Widens floating-point numbers to at least 32 bits: half precision would round an offset away."""
    return x.astype(promote_types(x.dtype, jnp.float32)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _entered(closed: Any, given: Sequence[Any], wanted: Any) -> Any:
    """Cuts out the jaxpr from `given` to one variable, with calls entered and collectives left."""

    def stay(eqn: Any, operands: list[Any]) -> list[Any] | None:
        return None if collective_of(eqn) is None else eqn.primitive.bind(*operands, **eqn.params)

    structs = list(map(graph.struct_of, given))
    piece = graph.subfunction(closed, list(given), [wanted])
    few = jax.make_jaxpr(lambda *values: piece(values))(*structs)
    return jax.make_jaxpr(lambda *values: graph.inlined(few, values, {"jit": stay, "pjit": stay}))(*structs)


def _axes_of(closed: Any) -> Any:
    """Finds the mesh axes over which the body of a collective reduces; none for one replica."""
    axes = [
        eqn.params["axes"] for eqn in graph.body_of(closed).eqns if variation.makes_alike(eqn) and "axes" in eqn.params
    ]
    return axes[0] if axes else ()


def _same_kind(a: Any, b: Any) -> bool:
    return any(jnp.issubdtype(a, kind) and jnp.issubdtype(b, kind) for kind in (jnp.floating, jnp.integer))
