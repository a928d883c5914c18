"""Warnings about a step that its trace alone justifies: nothing is compiled or run for them."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np

from jdist.core.collective_marks import collective_of
from jdist.jaxpr import graph, variation
from jdist.jaxpr.variation import Origin, Var
from jdist.support.tracebacks import callers_level

_SCALED = ("mul", "div", "neg", "max", "min")
# All replicas may shuffle their own rows in the same order: a drawn index says which row, and meets none.
_NOT_ROW_BY_ROW = ("concatenate", "dot_general", "gather", "scatter", "scatter-add", "dynamic_slice")
_REFORMED = ("convert_element_type", "reshape", "squeeze", "broadcast_in_dim", "copy", "optimization_barrier", "psum")


def notice(
    name: str, closed: Any, batch: Collection[Var], parts: int, own: Collection[Var] = (), *, by_weights: bool = False
) -> None:
    """Warns of draws shared by all parts, combined gradients of rows, and losses divided twice."""
    # Of the arguments of the step, as one part runs it, `batch` are rows, and `own` vary without being rows. `by_weights`: no
    # gradient is taken by anything else.
    if parts == 1:
        return
    is_plain = by_weights and not graph.contains_primitive(closed, *variation.DRAWS)
    origins = [] if is_plain else list(variation.origins(closed, batch, own))
    shared = next(shared_draws(origins), None)
    if shared is not None:
        warnings.warn(
            f"{name} draws {shared.str_short()} for the rows of its batch from a key that all replicas share: each of the "
            f"{parts} has the same numbers for its rows. Draw from a key of the replica's own: "
            "`key = jdist.replica_rng(key)`.",
            stacklevel=callers_level(),
        )
    by_rows = next(averaged_rows(origins), None)
    if by_rows is not None:
        warnings.warn(
            f"{name} takes a gradient by {by_rows.str_short()}, which is equal on all replicas, although each has "
            "other rows there: their gradients are combined, and no row has its own. Make the value from the batch, "
            '`0 * batch["x"]` in place of `jnp.zeros_like(batch["x"])`.',
            stacklevel=callers_level(),
        )
    rows = next((v.aval.shape[0] for v in batch if v.aval.ndim), 0)
    if divides_by_global_batch(closed, rows, parts):
        warnings.warn(
            f"{name} divides its loss by {rows * parts}, the rows of the global batch, and `jdist.value_and_grad` takes the "
            f'mean over {parts} replicas: gradients are {parts} times too small. Sum them, `op="sum"`; or divide by the '
            'replica\'s own rows, `jdist.mean(losses, batch["mask"])`.',
            stacklevel=callers_level(),
        )


def shared_draws(program: Iterable[tuple[Any, list[Origin]]]) -> Iterator[Any]:
    """Finds what is drawn from a key that does not vary and meets rows that do, number by row; yields its type."""
    for eqn, origins in program:
        ranks = {getattr(v.aval, "ndim", None) for v in eqn.invars}
        if len(ranks) != 1 or graph.nested_jaxprs(eqn) or eqn.primitive.name in _NOT_ROW_BY_ROW:
            continue
        rows = frozenset[int]().union(*(origin.rows for origin in origins))
        for v, origin in zip(eqn.invars, origins, strict=True):
            if not origin.varies and origin.drawn & rows:
                yield v.aval


def averaged_rows(program: Iterable[tuple[Any, list[Origin]]]) -> Iterator[Any]:
    """Finds gradients of rows, number by row, that are combined over the replicas; yields the type of each."""
    for eqn, origins in program:
        collective = collective_of(eqn)
        if collective is not None and collective.kind == "gradient":
            yield from (v.aval for v, origin in zip(eqn.invars, origins, strict=True) if 0 in origin.rows)


def divides_by_global_batch(closed: Any, rows: int, parts: int) -> bool:
    """Returns whether a loss (its gradients averaged over the parts) is a sum over a part's rows divided by those of all."""
    for eqn in graph.body_of(closed).eqns:
        collective = collective_of(eqn)
        if collective is not None and (collective.kind, collective.op) == ("gradient", "mean"):
            for reduction, divisor in last_reductions(closed, eqn.invars[0]):
                sizes = [reduction.invars[0].aval.shape[axis] for axis in reduction.params.get("axes", ())]
                if reduction.primitive.name == "reduce_sum" and rows in sizes and rows > 1:
                    own, of_all = np.prod(sizes), np.array([rows, np.prod(sizes)], float) * parts
                    if not np.isclose(divisor, own) and np.isclose(divisor, of_all, rtol=1e-6).any():
                        return True
        elif collective is None and any(
            divides_by_global_batch(body, rows, parts) for body in graph.nested_jaxprs(eqn)
        ):
            return True
    return False


def last_reductions(closed: Any, wanted: Var, divisor: float = 1.0) -> Iterator[tuple[Any, float]]:
    """Finds the equations that a scalar's terms come from, past those that reform or scale them, and the divisor of each."""
    made_by = {v: (eqn, i) for eqn in graph.body_of(closed).eqns for i, v in enumerate(eqn.outvars)}
    waiting = [(wanted, divisor)]
    while waiting:
        v, divisor = waiting.pop()
        if graph.is_literal(v) or v not in made_by:
            continue
        eqn, place = made_by[v]
        name, bodies = eqn.primitive.name, graph.nested_jaxprs(eqn)
        known = [operand for operand in eqn.invars if not graph.is_literal(operand)]
        if bodies and len(graph.body_of(bodies[0]).outvars) == len(eqn.outvars):
            yield from last_reductions(bodies[0], graph.body_of(bodies[0]).outvars[place], divisor)
        elif name in ("add", "add_any", "sub"):
            waiting += [(operand, divisor) for operand in known]
        elif name in _REFORMED and len(eqn.invars) > place:
            waiting.append((eqn.invars[place], divisor))
        elif name in _SCALED and len(known) == 1:
            factor = float(next((x.val for x in eqn.invars if graph.is_literal(x)), 1.0)) or 1.0
            waiting.append((known[0], divisor * {"div": factor, "mul": 1 / factor}.get(name, 1.0)))
        else:
            yield eqn, divisor
