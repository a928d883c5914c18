"""What depends on what in a traced step, and cutting a piece out of it.

The only file that handles jaxprs, and so the only one that knows how they differ between JAX versions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core as jex

Var = Any  # jax.extend.core.Var or Literal; a Literal depends on nothing


def body_of(closed: Any) -> Any:
    """The open jaxpr of a closed one; from JAX 0.12 on they are one type."""
    return closed.jaxpr


def dependents(closed: Any, sources: Iterable[Var], starts: Callable[[Any], bool] = lambda eqn: False) -> set[Var]:
    """Every variable of a jaxpr whose value depends on one of `sources`, these included.

    Args:
        closed: what `jax.make_jaxpr` returned.
        sources: variables of it.
        starts: equations for which it holds make their results dependent too, whatever they read.
    """
    found = set(sources)
    for eqn in body_of(closed).eqns:
        if starts(eqn) or any(v in found for v in eqn.invars if not isinstance(v, jex.Literal)):
            found.update(eqn.outvars)
    return found


def uses_primitive(eqn: Any, name: str) -> bool:
    """Whether an equation, or one nested in it, applies the primitive of that name."""
    return eqn.primitive.name == name or any(contains_primitive(j, name) for j in _nested(eqn.params.values()))


def contains_primitive(closed: Any, name: str) -> bool:
    """Whether a jaxpr applies the primitive of that name anywhere."""
    return any(uses_primitive(eqn, name) for eqn in body_of(closed).eqns)


def _nested(params: Iterable[Any]) -> Iterator[Any]:
    for param in params:
        if isinstance(param, jex.ClosedJaxpr):
            yield param
        elif isinstance(param, jex.Jaxpr):
            yield jex.ClosedJaxpr(param, ())
        elif isinstance(param, tuple | list):
            yield from _nested(param)


def needed(closed: Any, wanted: Iterable[Var], given: Collection[Var]) -> tuple[list[Any], set[Var]]:
    """What computing `wanted` from `given` takes.

    Returns:
        The equations, in order, and every variable that they and `wanted` read.
    """
    reads = {v for v in wanted if not isinstance(v, jex.Literal)}
    equations = []
    for eqn in reversed(body_of(closed).eqns):
        if any(v in reads and v not in given for v in eqn.outvars):
            equations.append(eqn)
            reads.update(v for v in eqn.invars if not isinstance(v, jex.Literal))
    return equations[::-1], reads


def subfunction(closed: Any, given: Sequence[Var], wanted: Sequence[Var]) -> Callable[[Sequence[jax.Array]], list[Any]]:
    """The function that computes the variables `wanted` from the variables `given`, and nothing else."""
    equations, _ = needed(closed, wanted, set(given))
    jaxpr = body_of(closed)
    piece = jaxpr.replace(
        invars=list(given),
        outvars=list(wanted),
        eqns=equations,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    run = jex.jaxpr_as_fun(jex.ClosedJaxpr(piece, closed.consts))
    return lambda values: list(run(*values))


def is_literal(v: Var) -> bool:
    """Whether an operand is a constant written into the jaxpr."""
    return isinstance(v, jex.Literal)
