"""The differences between replicas and microbatches in a traced step, and where they are combined.

In doubt a value counts as differing: a wrong "equal" gives wrong results, a wrong "differs" a refusal or more work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jdist.core.collective_marks import Collective, collective_of, gradient_number, is_own_part
from jdist.errors import StepError
from jdist.jaxpr import graph

Var = graph.Var

# JAX's primitives: those with the same result everywhere, draws (equal for equal keys), and those that differ in any case.
_MAKE_ALIKE = frozenset({"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"})
DRAWS = frozenset({"random_bits", "random_gamma"})
_MAKE_OWN = frozenset({"axis_index", "ppermute", "all_to_all", "reduce_scatter"})
# Called with an equation, which operands vary, and whether replicas may take another branch or number of rounds.
Visit = Callable[[Any, list[bool], bool], None]


def makes_alike(eqn: Any) -> bool:
    """Returns whether an equation is one of JAX's own collectives of all replicas that gives them the same."""
    return (
        eqn.primitive.name in _MAKE_ALIKE
        and eqn.params.get("axis_index_groups") is None
        and set(_axes_of(eqn)).issuperset(_bound_axes())
    )


def _axes_of(eqn: Any) -> tuple[Any, ...]:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def _bound_axes() -> list[str]:
    """Lists the mesh axes over which several replicas are being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    return [axis for axis in mesh.manual_axes if mesh.shape[axis] > 1]


def of_one_microbatch(closed: Any, sources: Collection[Var]) -> set[Var]:
    """Finds the variables that depend on one of `sources` through no collective of jdist."""
    # A collective of JAX's own combines the replicas' same microbatch: its results belong to that
    # microbatch.
    own = set(sources)
    for eqn in graph.body_of(closed).eqns:
        combines = collective_of(eqn) is not None and not is_transposed_gather(eqn)
        if not combines and any(graph.is_in(v, own) for v in eqn.invars):
            own.update(eqn.outvars)
    return own


def varying(closed: Any, sources: Collection[Var], visit: Visit = lambda *_: None) -> set[Var]:
    """Finds the variables that differ from replica to replica if the arguments `sources` do."""
    # If a nested function cannot be analysed, all its results count as different. `visit` sees
    # every equation, also of nested functions, and some of these several times.
    variables = set(sources)
    _propagate(graph.body_of(closed), variables, visit)
    return variables


ByRows = frozenset[tuple[int, int]]  # gradients, by the number of the call and of the leaf


def traced(trace: Callable[[ByRows], Any], sources: Callable[[Any], Collection[Var]]) -> Any:
    """Traces a step, again if it takes gradients by a replica's own arrays: `(jaxpr, variables that vary, by weights, ...)`."""
    # `trace(by_rows) -> (jaxpr, ...)`. Refuses collectives that some replicas may never reach. By weights: all gradients are.
    by_rows: ByRows = frozenset()
    while True:
        closed, *rest = trace(by_rows)
        found, variables, by_weights = _gradients_by_rows(closed, sources(closed))
        if found <= by_rows:
            return graph.without(closed, lambda eqn: gradient_number(eqn) is not None), variables, by_weights, *rest
        by_rows |= found


def _gradients_by_rows(closed: Any, own: Collection[Var]) -> tuple[ByRows, set[Var], bool]:
    """Finds the gradients by what only one replica has, and all that varies; weights that each has moved stay weights."""
    found, weights = set[tuple[int, int]](), {v for v in graph.body_of(closed).invars if v not in own}
    for eqn in graph.body_of(closed).eqns:
        terms = eqn.invars if eqn.primitive.name in ("add", "add_any") else eqn.invars[:1]
        if eqn.primitive.name in _MOVING and any(graph.is_in(v, weights) for v in terms):
            weights.update(eqn.outvars)

    def visit(eqn: Any, flags: list[bool], is_choice: bool) -> None:
        if is_choice and _bound_axes() and any(map(_waits, graph.nested_jaxprs(eqn))):
            raise StepError(
                _MAY_WAIT.format({"cond": "cond` or `lax.switch", "while": "while_loop"}[eqn.primitive.name])
            )
        if (number := gradient_number(eqn)) is not None:
            operands = enumerate(zip(eqn.invars, flags, strict=True))
            found.update((number, place) for place, (v, varies) in operands if varies and v not in weights)

    variables = varying(closed, own, visit)
    notes = (eqn for eqn in graph.all_equations(closed) if gradient_number(eqn) is not None)
    return frozenset(found), variables, all(graph.is_in(v, weights) for eqn in notes for v in eqn.invars)


_MOVING = frozenset({"add", "add_any", "sub", "convert_element_type", "copy", "optimization_barrier", "stop_gradient"})
_MAY_WAIT = (
    "the step calls a collective (`jdist.value_and_grad`, `jdist.all_reduce`, a masked `jdist.mean`, `lax.psum`, ...) inside a "
    "`lax.{}` with a condition on a replica's own rows: replicas that decide differently never reach the call, and "
    'others wait for them forever. Combine the condition first, for example by `jdist.all_reduce(x, "max")`; or make the call '
    "outside, and choose between the results by `jnp.where`. A line search takes `value_fn=jdist.global_loss(loss_fn)`."
)


def _waits(closed: Any) -> bool:
    """Returns whether replicas wait for one another in a function."""
    names, bound = (_MAKE_ALIKE | _MAKE_OWN) - {"axis_index"}, _bound_axes()
    return any(
        eqn.primitive.name in names and not set(_axes_of(eqn)).isdisjoint(bound) for eqn in graph.all_equations(closed)
    )


def _propagate(jaxpr: Any, varying: set[Var], visit: Visit) -> None:
    """Adds to the variables that vary those computed from them."""
    for eqn in jaxpr.eqns:
        flags = [graph.is_in(v, varying) for v in eqn.invars]
        if True in flags or _may_differ(eqn):
            varying.update(v for v, varies in zip(eqn.outvars, _results_vary(eqn, flags, visit), strict=True) if varies)


def _may_differ(eqn: Any) -> bool:
    """Returns whether an equation may give replicas different results for equal operands."""
    return graph.uses_primitive(eqn, *_MAKE_OWN, *_MAKE_ALIKE) or is_transposed_gather(eqn)


def _results_vary(eqn: Any, flags: list[bool], visit: Visit) -> list[bool]:
    """Marks the results of an equation that vary, if the operands marked in `flags` do."""
    is_choice = eqn.primitive.name == "cond" and flags[0]
    visit(eqn, flags, is_choice)
    name, every = eqn.primitive.name, [True] * len(eqn.outvars)
    if is_transposed_gather(eqn):
        return every
    if collective_of(eqn) is not None or makes_alike(eqn):
        return [False] * len(eqn.outvars)
    if is_own_part(eqn):  # of an array that all replicas have; the step sees the gathered array
        return [any(flags)]
    if name in _MAKE_OWN:
        return every
    bodies = graph.nested_jaxprs(eqn)
    if not bodies:
        return every if any(flags) or eqn.params.get("axis_index_groups") is not None else [False] * len(every)
    if name in graph.CALLS and len(graph.body_of(bodies[0]).invars) == len(flags):
        return _body_varies(bodies[0], flags, visit)
    if name == "cond":
        results = [any(each) for each in zip(*(_body_varies(b, flags[1:], visit) for b in bodies), strict=True)]
        return every if is_choice else results
    if name == "while":
        return _while_varies(eqn, flags, visit)
    if name == "scan":
        first = graph.number_not_scanned(eqn.invars, graph.body_of(bodies[0]).invars)
        carry = graph.number_not_scanned(eqn.outvars, graph.body_of(bodies[0]).outvars)
        while True:
            results = _body_varies(bodies[0], flags, visit)
            after = [a or b for a, b in zip(flags[first - carry : first], results[:carry], strict=True)]
            if after == flags[first - carry : first]:
                return results
            flags = [*flags[: first - carry], *after, *flags[first:]]
    for body in bodies:
        _body_varies(body, [any(flags)] * len(graph.body_of(body).invars), visit)
    own = graph.uses_primitive(eqn, *_MAKE_OWN)
    return every if own or any(flags) else [False] * len(every)


def _while_varies(eqn: Any, flags: list[bool], visit: Visit) -> list[bool]:
    """Marks the results of a `while_loop` that vary: all of them where replicas go round it differently often."""
    condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    carry = flags[len(flags) - len(eqn.outvars) :]
    of_condition = flags[: len(graph.body_of(condition).invars) - len(carry)]
    of_body = flags[len(of_condition) : len(flags) - len(carry)]
    while True:
        (is_choice,) = _body_varies(condition, [*of_condition, *carry], visit)
        results = _body_varies(body, [*of_body, *carry], visit)
        after = [is_choice or a or b for a, b in zip(carry, results, strict=True)]
        if after == carry:
            visit(eqn, flags, is_choice)
            return after
        carry = after


def _body_varies(closed: Any, flags: Sequence[bool], visit: Visit) -> list[bool]:
    jaxpr = graph.body_of(closed)
    varying = {v for v, varies in zip(jaxpr.invars, flags, strict=True) if varies}
    _propagate(jaxpr, varying, visit)
    return [graph.is_in(v, varying) for v in jaxpr.outvars]


def is_transposed_gather(eqn: Any) -> bool:
    """Returns whether an equation is the transpose of `jdist.all_gather`: each replica's rows of the sum over all."""
    collective = collective_of(eqn)
    return collective is not None and collective.op == "gather" and eqn.outvars[0].aval.size < eqn.invars[0].aval.size


def collectives_in(eqn: Any) -> list[Collective]:
    """Lists the collectives of jdist that an equation applies, itself or in what it calls, repeats or chooses from."""
    own = collective_of(eqn)
    if own is not None:
        return [own]
    return [c for body in graph.nested_jaxprs(eqn) for inner in graph.body_of(body).eqns for c in collectives_in(inner)]


def holds_collective(eqn: Any) -> bool:
    """Returns whether an equation is a call, to be entered, of a function that holds a collective of jdist."""
    enterable = eqn.primitive.name in graph.CALLS - {"checkpoint", "remat2"} and collective_of(eqn) is None
    return enterable and bool(collectives_in(eqn))


@dataclass(frozen=True)
class Origin:
    """The origin of a value, axis by axis."""

    varies: bool = False  # from replica to replica
    rows: frozenset[int] = frozenset()  # axes that are the batch's rows
    drawn: frozenset[int] = frozenset()  # axes along which it was drawn at random, from a key that all replicas share


_ALIKE = Origin()


def origins(closed: Any, batch: Collection[Var], own: Collection[Var] = ()) -> Iterator[tuple[Any, list[Origin]]]:
    """Iterates over those of a step's equations, also nested ones, that read what varies or was drawn, with the origins."""
    # `batch` are its arguments with the rows first, `own` others that vary.
    known = {v: Origin(varies=True, rows=frozenset({0} if v.aval.ndim else ())) for v in batch}
    yield from _origins(graph.body_of(closed), {**known, **dict.fromkeys(own, Origin(varies=True))})


def _origins(jaxpr: Any, known: dict[Var, Origin]) -> Iterator[tuple[Any, list[Origin]]]:
    for eqn in jaxpr.eqns:
        operands = [_ALIKE if graph.is_literal(v) else known.get(v, _ALIKE) for v in eqn.invars]
        if (
            all(origin is _ALIKE for origin in operands)
            and not graph.uses_primitive(eqn, *DRAWS)
            and not _may_differ(eqn)
        ):
            continue
        yield eqn, operands
        bodies = [] if collective_of(eqn) is not None else graph.nested_jaxprs(eqn)
        results: list[list[Origin]] = []
        for body in map(graph.body_of, bodies):
            inside = operands[len(operands) - len(body.invars) :]
            if eqn.primitive.name == "scan":
                first = graph.number_not_scanned(eqn.invars, body.invars)
                inside = [*inside[:first], *(_moved(origin, -1) for origin in inside[first:])]
            elif eqn.primitive.name not in (*graph.CALLS, "cond", "shard_map") or len(inside) != len(body.invars):
                continue
            known_inside = dict(zip(body.invars, inside, strict=True))
            yield from _origins(body, known_inside)
            after = [_ALIKE if graph.is_literal(v) else known_inside.get(v, _ALIKE) for v in body.outvars]
            if eqn.primitive.name == "scan":
                carry = graph.number_not_scanned(eqn.outvars, body.outvars)
                after = [*after[:carry], *(_moved(origin, 1) for origin in after[carry:])]
            results.append(after)
        flags = _results_vary(eqn, [origin.varies for origin in operands], lambda *_: None)
        for i, (v, varies) in enumerate(zip(eqn.outvars, flags, strict=True)):
            origin = (
                _union(each[i] for each in results) if results else _of_result(eqn, v.aval, operands, varies=varies)
            )
            origin = Origin(varies, origin.rows if varies else frozenset(), origin.drawn)
            known[v] = _ALIKE if origin == _ALIKE else origin


def _of_result(eqn: Any, aval: Any, operands: Sequence[Origin], *, varies: bool) -> Origin:
    if eqn.primitive.name in DRAWS:
        return Origin(drawn=frozenset() if varies else frozenset(range(aval.ndim)))
    if collective_of(eqn) is not None or not hasattr(aval, "shape"):
        return Origin()
    moved = []
    for i, (v, origin) in enumerate(zip(eqn.invars, operands, strict=True)):
        place = _places_after(eqn, i, v.aval.shape, aval.shape) if origin.rows or origin.drawn else {}
        moved.append(Origin(rows=_at(origin.rows, place), drawn=_at(origin.drawn, place)))
    return _union(moved)


def _places_after(eqn: Any, operand: int, before: tuple[int, ...], after: tuple[int, ...]) -> dict[int, int]:
    """Maps the axes of an operand to those of the result that they become."""
    name, params, axes = eqn.primitive.name, eqn.params, range(len(before))
    if name == "broadcast_in_dim":
        places = dict(enumerate(params["broadcast_dimensions"]))
    elif name == "transpose":
        places = {a: i for i, a in enumerate(params["permutation"])}
    elif name == "dot_general":
        contracted, batched = params["dimension_numbers"]
        free = [a for a in axes if a not in (*contracted[operand], *batched[operand])]
        first = len(after) - len(free) if operand else len(batched[0])
        places = {a: i for i, a in enumerate(batched[operand])} | {a: first + i for i, a in enumerate(free)}
    elif name in ("reshape", "squeeze", "expand_dims"):
        ends = {math.prod(after[: i + 1]): i for i in reversed(range(len(after)))}
        places = {a: ends[end] for a in axes if (end := math.prod(before[: a + 1])) in ends}
    elif name == "conv_general_dilated":  # a kernel's gradient sums over the rows as its features
        sides = params["dimension_numbers"]
        places = {sides.rhs_spec[0]: sides.out_spec[1]} if operand else {sides.lhs_spec[0]: sides.out_spec[0]}
    elif name.startswith("scatter") and operand:
        places = {}
    elif "axes" in params and len(after) < len(before):
        places = {a: i for i, a in enumerate(a for a in axes if a not in params["axes"])}
    else:
        places = {a: a for a in axes}
    return {a: i for a, i in places.items() if i < len(after) and before[a] == after[i]}


def _at(axes: Collection[int], places: dict[int, int]) -> frozenset[int]:
    return frozenset(places[a] for a in axes if a in places)


def _moved(origin: Origin, by: int) -> Origin:
    rows, drawn = (frozenset(a + by for a in axes if a + by >= 0) for axes in (origin.rows, origin.drawn))
    return Origin(origin.varies, rows, drawn)


def _union(origins: Iterable[Origin]) -> Origin:
    origins = list(origins)
    return Origin(
        any(o.varies for o in origins),
        frozenset[int]().union(*(o.rows for o in origins)),
        frozenset[int]().union(*(o.drawn for o in origins)),
    )
