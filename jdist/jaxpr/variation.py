"""The differences between replicas and microbatches in a traced step, and where they are combined."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jdist.core.collective_marks import Collective, collective_of
from jdist.jaxpr import graph

Var = graph.Var

# JAX's collectives whose result is the same on every replica, and primitives whose result differs even for equal operands.
_MAKE_ALIKE = frozenset({"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"})
_MAKE_OWN = frozenset({"axis_index", "ppermute", "all_to_all", "reduce_scatter"})


def makes_alike(eqn: Any) -> bool:
    """Whether an equation is one of JAX's own collectives of all replicas that gives them the same."""
    return eqn.primitive.name in _MAKE_ALIKE and eqn.params.get("axis_index_groups") is None


def of_one_microbatch(closed: Any, sources: Collection[Var]) -> set[Var]:
    """Finds the variables that depend on one of `sources` by way of no collective of jdist.

    A collective of JAX's own combines the replicas, and of each the same microbatch: what it returns is that
    microbatch's.
    """
    own = set(sources)
    for eqn in graph.body_of(closed).eqns:
        combines = collective_of(eqn) is not None and not is_transposed_gather(eqn)
        if not combines and any(graph.is_in(v, own) for v in eqn.invars):
            own.update(eqn.outvars)
    return own


def varying(closed: Any, sources: Collection[Var]) -> set[Var]:
    """Finds the variables that differ from replica to replica if the arguments `sources` do.

    Where a nested function cannot be analysed, all its results count as different.
    """
    variables = set(sources)
    _propagate(graph.body_of(closed), variables)
    return variables


def _propagate(jaxpr: Any, varying: set[Var]) -> None:
    """Adds to the variables that vary those computed from them."""
    for eqn in jaxpr.eqns:
        flags = [graph.is_in(v, varying) for v in eqn.invars]
        varying.update(v for v, varies in zip(eqn.outvars, _results_vary(eqn, flags), strict=True) if varies)


def _results_vary(eqn: Any, flags: list[bool]) -> list[bool]:
    """Marks the results of an equation that vary, if the operands marked in `flags` do."""
    name, every = eqn.primitive.name, [True] * len(eqn.outvars)
    if is_transposed_gather(eqn):
        return every
    if collective_of(eqn) is not None or makes_alike(eqn):
        return [False] * len(eqn.outvars)
    if name in _MAKE_OWN:
        return every
    bodies = graph.nested_jaxprs(eqn)
    if not bodies:
        return every if any(flags) or eqn.params.get("axis_index_groups") is not None else [False] * len(every)
    if name in graph.CALLS and len(graph.body_of(bodies[0]).invars) == len(flags):
        return _body_varies(bodies[0], flags)
    if name == "cond":
        if flags[0]:
            return every
        return [any(each) for each in zip(*(_body_varies(b, flags[1:]) for b in bodies), strict=True)]
    if name == "scan":
        first = graph.number_not_scanned(eqn.invars, graph.body_of(bodies[0]).invars)
        carry = graph.number_not_scanned(eqn.outvars, graph.body_of(bodies[0]).outvars)
        while True:
            results = _body_varies(bodies[0], flags)
            after = [a or b for a, b in zip(flags[first - carry : first], results[:carry], strict=True)]
            if after == flags[first - carry : first]:
                return results
            flags = [*flags[: first - carry], *after, *flags[first:]]
    own = graph.uses_primitive(eqn, *_MAKE_OWN)
    return every if own or any(flags) else [False] * len(every)


def _body_varies(closed: Any, flags: Sequence[bool]) -> list[bool]:
    jaxpr = graph.body_of(closed)
    varying = {v for v, varies in zip(jaxpr.invars, flags, strict=True) if varies}
    _propagate(jaxpr, varying)
    return [graph.is_in(v, varying) for v in jaxpr.outvars]


def is_transposed_gather(eqn: Any) -> bool:
    """Whether an equation is what differentiation makes of `jdist.all_gather`: each replica's rows of the sum over all."""
    collective = collective_of(eqn)
    return collective is not None and collective.op == "gather" and eqn.outvars[0].aval.size < eqn.invars[0].aval.size


def collectives_in(eqn: Any) -> list[Collective]:
    """Lists the collectives of jdist that an equation applies, itself or in what it calls, repeats or chooses from."""
    own = collective_of(eqn)
    if own is not None:
        return [own]
    return [c for body in graph.nested_jaxprs(eqn) for inner in graph.body_of(body).eqns for c in collectives_in(inner)]


def flat_collectives(closed: Any) -> Any:
    """Enters the calls (`jax.jit`, `custom_jvp`) of a function that hold a collective of jdist; other calls stay."""
    if not any(_holds_collective(eqn) for eqn in graph.body_of(closed).eqns):
        return closed

    def entered(eqn: Any, operands: list[Any], last: Any) -> list[Any] | None:
        if not _holds_collective(eqn):
            return None
        return graph.run(flat_collectives(graph.nested_jaxprs(eqn)[0]), operands)

    return graph.replaced(closed, entered)


def _holds_collective(eqn: Any) -> bool:
    """Whether an equation is a call, to be entered, of a function that holds a collective of jdist."""
    enterable = eqn.primitive.name in graph.CALLS - {"checkpoint", "remat2"} and collective_of(eqn) is None
    return enterable and bool(collectives_in(eqn))
