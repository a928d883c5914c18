"""A traced step without what makes two runs of it differ on purpose: random draws, and calls of the host.

A replica draws for its own rows, and from a key of its own: no draw of N replicas can equal that of one. With one constant in
the place of every draw, whatever still differs is not the draws' doing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

_UNIFORM = 0.1  # keeps what dropout would keep at any usual rate, and is no middle of a distribution
_DRAWS = ("random_bits", "random_gamma")
_PRINTS = ("debug_print", "debug_callback")  # they return nothing; other calls of the host do
_CALLBACKS = ("io_callback", "outside_call")


def equations(closed: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, those of the functions and loops in it included."""
    for eqn in getattr(closed, "jaxpr", closed).eqns:
        yield eqn
        for inner in _jaxprs(eqn):
            yield from equations(inner)


def draws(closed: Any) -> bool:
    """Whether a jaxpr draws random numbers."""
    return any(eqn.primitive.name in _DRAWS for eqn in equations(closed))


def draws_until(closed: Any) -> bool:
    """Whether it draws until what it drew is accepted: of a constant it might never be."""
    loops = (eqn for eqn in equations(closed) if eqn.primitive.name == "while")
    return any(eqn.primitive.name in _DRAWS for loop in loops for inner in _jaxprs(loop) for eqn in equations(inner))


def prints(closed: Any) -> bool:
    """Whether it prints, or calls the host for nothing in return."""
    return any(eqn.primitive.name in _PRINTS for eqn in equations(closed))


def calls_the_host(closed: Any) -> bool:
    """Whether it calls a function of the host that may change something there, and reads what that returns."""
    return any(eqn.primitive.name in _CALLBACKS for eqn in equations(closed))


def quiet(closed: Any) -> Any:
    """The same jaxpr with one constant for every draw, and without prints."""
    return _quiet(closed, {})


def _quiet(jaxpr: Any, known: dict[int, Any]) -> Any:
    result: Any
    if id(jaxpr) in known:
        return known[id(jaxpr)]
    is_closed = isinstance(jaxpr, jex.ClosedJaxpr) and not isinstance(jaxpr, jex.Jaxpr)
    opened: Any = jaxpr  # for type checkers, which take it for what it was compared with
    if is_closed:
        inner = _quiet(opened.jaxpr, known)
        result = opened if inner is opened.jaxpr else jex.ClosedJaxpr(inner, opened.consts)
    else:
        eqns = [new for eqn in opened.eqns for new in _replaced(eqn, known)]
        same = len(eqns) == len(opened.eqns) and all(a is b for a, b in zip(eqns, opened.eqns, strict=True))
        # Without effects: those of the prints are gone, and only they were there.
        result = opened if same else opened.replace(eqns=eqns, effects=_effects(opened, eqns))
    known[id(jaxpr)] = result
    return result


def _effects(jaxpr: Any, eqns: list[Any]) -> Any:
    kept = {effect for eqn in eqns for effect in eqn.effects}
    return type(jaxpr.effects)(effect for effect in jaxpr.effects if effect in kept)


def _replaced(eqn: Any, known: dict[int, Any]) -> list[Any]:
    """The equations in the place of one."""
    name = eqn.primitive.name
    if name in _PRINTS:
        return []
    if name in _DRAWS:
        return _constant(eqn)
    params = {key: _param(value, known) for key, value in eqn.params.items()}
    if all(params[key] is value for key, value in eqn.params.items()):
        return [eqn]
    inner = {effect for value in params.values() for each in _jaxprs_of(value) for effect in each.effects}
    dropped = {effect for each in _jaxprs(eqn) for effect in each.effects} - inner
    return [eqn.replace(params=params, effects=type(eqn.effects)(e for e in eqn.effects if e not in dropped))]


def _param(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, jex.ClosedJaxpr | jex.Jaxpr):
        return _quiet(value, known)
    if type(value) in (tuple, list):
        items = [_param(each, known) for each in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    return value


def _constant(eqn: Any) -> list[Any]:
    """The equations that give a constant in the place of a draw."""
    (out,) = eqn.outvars
    shape, dtype = out.aval.shape, out.aval.dtype
    value = 1 if jnp.issubdtype(dtype, jnp.floating) else int(_UNIFORM * 2 ** (8 * dtype.itemsize))
    # With an axis more, as a scalar constant would be no equation.
    made = jax.make_jaxpr(lambda: jax.lax.full((1, *shape), value, dtype).reshape(shape))()
    *first, last = (made_eqn.replace(ctx=eqn.ctx) for made_eqn in made.jaxpr.eqns)
    return [*first, last.replace(outvars=[out])]


def _jaxprs(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        yield from _jaxprs_of(value)


def _jaxprs_of(value: Any) -> Iterator[Any]:
    if isinstance(value, jex.ClosedJaxpr | jex.Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _jaxprs_of(each)
