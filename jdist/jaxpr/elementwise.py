"""Equations of an update part on arrays in parts: how they are prepared, and applied to stored arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist.jaxpr import graph, variation
from jdist.reduction.algorithm import axes_size

# fmt: off
ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e",
    "cbrt", "ceil", "clamp", "complex", "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div",
    "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igammac", "imag",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg",
    "nextafter", "not", "or", "population_count", "pow", "real", "reduce_precision", "regularized_incomplete_beta", "rem",
    "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh",
    "sqrt", "square", "sub", "tan", "tanh", "xor",
})
# fmt: on
# The reductions that are taken part by part, each with the value that fills up an array.
FILLINGS: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda dtype: 0,
    "reduce_prod": lambda dtype: 1,
    "reduce_and": lambda dtype: True,
    "reduce_or": lambda dtype: False,
    "reduce_max": lambda dtype: _extreme(dtype, lowest=True),
    "reduce_min": lambda dtype: _extreme(dtype, lowest=False),
}
# Of integers, bit by bit, not every backend can all-reduce them.
OF_BOOLS = frozenset({"reduce_and", "reduce_or"})
COLLECTIVES = frozenset({"axis_index", "all_gather", "all_to_all", "ppermute", "psum", "pmax", "pmin", "psum_scatter"})


def _extreme(dtype: Any, *, lowest: bool) -> Any:
    if dtype == jnp.bool_:
        return not lowest
    if jnp.issubdtype(dtype, jnp.inexact):
        return -jnp.inf if lowest else jnp.inf
    info = jnp.iinfo(dtype)
    return info.min if lowest else info.max


def prepared(closed: Any, arguments: Sequence[Any]) -> Any:
    """Inlines calls of an update part, turns conditions into selections and sums into products."""
    # Called where the replica axes are bound. A sum over the replicas is a product where all of
    # them hold the same value, as they mostly do in an update part.

    own: set[Any] = set()

    def is_alike(eqn: Any) -> bool:
        return eqn.params.get("axis_index_groups") is None and not any(graph.is_in(v, own) for v in eqn.invars)

    def total(eqn: Any, operands: list[Any]) -> list[Any] | None:
        size = axes_size(eqn.params["axes"])  # of all replicas, or of those in one group
        return [x * jnp.asarray(size, jnp.result_type(x)) for x in operands] if is_alike(eqn) else None

    def same(eqn: Any, operands: list[Any]) -> list[Any] | None:
        return operands if is_alike(eqn) else None

    def selected(eqn: Any, operands: list[Any]) -> list[Any] | None:
        branches = graph.nested_jaxprs(eqn)
        if not all(map(_is_elementwise, branches)):
            return None
        index, *rest = operands
        results = [graph.inlined(branch, rest, {"cond": selected}) for branch in branches]
        which = index if len(results) > 2 else index > 0
        return [jax.lax.select_n(which, *cases) for cases in zip(*results, strict=True)]

    flat = jax.make_jaxpr(lambda *values: graph.inlined(closed, values, {"cond": selected}))(*arguments)
    own = variation.varying(flat, ())
    rules = {"psum": total, "psum_invariant": total, "pmax": same, "pmin": same}
    return jax.make_jaxpr(lambda *values: graph.inlined(flat, values, rules))(*arguments)


def _is_elementwise(closed: Any) -> bool:
    def fits(eqn: Any) -> bool:
        nested = graph.nested_jaxprs(eqn)
        return all(map(_is_elementwise, nested)) if nested else eqn.primitive.name in ELEMENTWISE | graph.RESHAPING

    return all(map(fits, graph.body_of(closed).eqns))


def apply_stored(eqn: Any, operands: list[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """Applies an elementwise equation to stored arrays of a stored shape, and to scalars."""
    name = eqn.primitive.name
    if name in graph.RESHAPING:
        return operands[0]
    first, *others = operands
    if name == "select_n":
        operands = [first, *(_broadcast(x, shape) for x in others)]
    elif name == "clamp" or not any(jnp.ndim(x) for x in operands):
        operands = [_broadcast(x, shape) for x in operands]
    return bind(eqn, operands)


def bind(eqn: Any, operands: Sequence[Any], **changed: Any) -> Any:
    """Applies an equation to operands of any shape, outside of the mesh that it was traced under."""
    # A sharding among the parameters names the mesh of the trace, and its axes are no longer bound.
    params = {k: None if isinstance(x, jax.sharding.Sharding) else x for k, x in eqn.params.items()}
    return eqn.primitive.bind(*operands, **{**params, **changed})


def _broadcast(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return x if jnp.ndim(x) else jax.lax.broadcast(x, shape)
