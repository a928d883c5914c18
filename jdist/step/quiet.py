"""Traced steps without what makes two runs differ on purpose: random draws, and calls of the host.

A replica draws for its own rows, and from a key of its own: no draw of N replicas can equal that of one. With one constant in
the place of every draw, whatever still differs is not the draws' doing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from jdist.jaxpr import graph
from jdist.jaxpr.graph import ClosedJaxpr

_UNIFORM = 0.1  # kept by dropout at any usual rate, and not the middle of a distribution
_DRAWS = ("random_bits", "random_gamma")
_PRINTS = ("debug_print", "debug_callback")  # they return nothing; other calls of the host do
_CALLBACKS = ("io_callback", "outside_call")


def draws(closed: Any) -> bool:
    """Whether a jaxpr draws random numbers."""
    return graph.contains_primitive(closed, *_DRAWS)


def draws_until(closed: Any) -> bool:
    """Whether it draws until what it drew is accepted: of a constant it might never be."""
    loops = (eqn for eqn in graph.all_equations(closed) if eqn.primitive.name == "while")
    return any(graph.uses_primitive(loop, *_DRAWS) for loop in loops)


def prints(closed: Any) -> bool:
    """Whether it prints, or calls the host for nothing in return."""
    return graph.contains_primitive(closed, *_PRINTS)


def calls_the_host(closed: Any) -> bool:
    """Whether it calls a function of the host that may change something there, and reads what that returns."""
    return graph.contains_primitive(closed, *_CALLBACKS)


def quiet(closed: Any) -> Any:
    """Rewrites a jaxpr with one constant for every draw, and without prints."""
    return _rewritten(closed, _quiet, {})


def shaken(closed: Any, eps: float) -> Any:
    """Rewrites a jaxpr with errors of rounding, relative to `eps`, in all that is summed.

    A bias of zero has a gradient that may be zero but for the order of its sum. Errors in the arguments alone do not
    show that where the sum's terms do not depend on numbers with a fraction.
    """
    return _rewritten(closed, lambda eqn: _shaken(eqn, eps), {})


def _rewritten(jaxpr: Any, rewrite: Callable[[Any], list[Any] | None], known: dict[int, Any]) -> Any:
    result: Any
    if id(jaxpr) in known:
        return known[id(jaxpr)]
    is_closed = isinstance(jaxpr, ClosedJaxpr) and not isinstance(jaxpr, jex.Jaxpr)
    opened: Any = jaxpr  # type checkers narrow `jaxpr` by the check above
    if is_closed:
        inner = _rewritten(opened.jaxpr, rewrite, known)
        result = opened if inner is opened.jaxpr else ClosedJaxpr(inner, opened.consts)
    else:
        eqns = [new for eqn in opened.eqns for new in _replaced(eqn, rewrite, known)]
        same = len(eqns) == len(opened.eqns) and all(a is b for a, b in zip(eqns, opened.eqns, strict=True))
        if same:
            result = opened
        else:  # without the effects of prints that are gone
            kept = {effect for eqn in eqns for effect in eqn.effects}
            effects = type(opened.effects)(effect for effect in opened.effects if effect in kept)
            result = opened.replace(eqns=eqns, effects=effects)
    known[id(jaxpr)] = result
    return result


def _quiet(eqn: Any) -> list[Any] | None:
    if eqn.primitive.name in _PRINTS:
        return []
    return _constant(eqn) if eqn.primitive.name in _DRAWS else None


def _shaken(eqn: Any, eps: float) -> list[Any] | None:
    if eqn.primitive.name != "reduce_sum" or isinstance(eqn.invars[0], jex.Literal):
        return None
    operand, aval = eqn.invars[0], eqn.invars[0].aval
    if (
        not jnp.issubdtype(aval.dtype, jnp.floating) or aval.dtype == jnp.float64
    ):  # doubles are exact enough in any order
        return None

    def function(x: jax.Array) -> jax.Array:
        numbers = jax.lax.reshape(jax.lax.iota(jnp.float32, x.size), x.shape)
        errors = jax.lax.sin(jax.lax.mul(jax.lax.add(numbers, 1.0), 12.9898))  # as good as random, one for each term
        factors = jax.lax.add(jax.lax.mul(errors, eps), 1.0)
        return eqn.primitive.bind(jax.lax.convert_element_type(factors * x.astype(jnp.float32), x.dtype), **eqn.params)

    closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    places = {closed.jaxpr.invars[0]: operand, closed.jaxpr.outvars[0]: eqn.outvars[0]}

    def placed(v: Any) -> Any:
        return v if isinstance(v, jex.Literal) else places.get(v, v)

    return [
        each.replace(invars=list(map(placed, each.invars)), outvars=list(map(placed, each.outvars)), ctx=eqn.ctx)
        for each in closed.jaxpr.eqns
    ]


def _replaced(eqn: Any, rewrite: Callable[[Any], list[Any] | None], known: dict[int, Any]) -> list[Any]:
    """Rewrites one equation, into none or several."""
    rewritten = rewrite(eqn)
    if rewritten is not None:
        return rewritten
    params = {key: _param(value, rewrite, known) for key, value in eqn.params.items()}
    if all(params[key] is value for key, value in eqn.params.items()):
        return [eqn]
    inner = {effect for each in graph.jaxprs_in(params.values()) for effect in each.effects}
    dropped = {effect for each in graph.nested_jaxprs(eqn) for effect in each.effects} - inner
    return [eqn.replace(params=params, effects=type(eqn.effects)(e for e in eqn.effects if e not in dropped))]


def _param(value: Any, rewrite: Callable[[Any], list[Any] | None], known: dict[int, Any]) -> Any:
    if isinstance(value, ClosedJaxpr | jex.Jaxpr):
        return _rewritten(value, rewrite, known)
    if type(value) in (tuple, list):
        items = [_param(each, rewrite, known) for each in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    return value


def _constant(eqn: Any) -> list[Any]:
    """Makes the equations of a constant in the place of a draw."""
    (out,) = eqn.outvars
    shape, dtype = out.aval.shape, out.aval.dtype
    value = 1 if jnp.issubdtype(dtype, jnp.floating) else int(_UNIFORM * 2 ** (8 * dtype.itemsize))
    # With one more axis, as a scalar constant would be no equation.
    closed = jax.make_jaxpr(lambda: jax.lax.full((1, *shape), value, dtype).reshape(shape))()
    *first, last = (each.replace(ctx=eqn.ctx) for each in closed.jaxpr.eqns)
    return [*first, last.replace(outvars=[out])]
