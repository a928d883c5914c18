"""The dependences in a traced step, and pieces cut out of it.

It alone builds and evaluates jaxprs, and so alone knows how they differ between JAX versions.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core as jex

from jdist.core.collective_marks import collective_of

# Since JAX 0.12 it is Jaxpr itself; the name stays, unknown to type checkers.
ClosedJaxpr: Any = jex.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]

# Primitives that change the layout of an array's elements.
RESHAPING = frozenset({"reshape", "squeeze", "expand_dims", "broadcast_in_dim"})
PRINTS = ("debug_print", "debug_callback")  # they return nothing
HOST_CALLS = (*PRINTS, "io_callback", "pure_callback")

Var = Any  # jax.extend.core.Var or Literal; a Literal depends on nothing


def body_of(closed: Any) -> Any:
    """Opens a closed jaxpr; from JAX 0.12 on they are one type."""
    return closed.jaxpr


def dependents(closed: Any, sources: Iterable[Var]) -> set[Var]:
    """Finds the variables of a jaxpr that depend on one of `sources`, these included."""
    variables = set(sources)
    for eqn in body_of(closed).eqns:
        if any(is_in(v, variables) for v in eqn.invars):
            variables.update(eqn.outvars)
    return variables


def forwarded(closed: Any, *, collectives: bool = False) -> Any:
    """Replaces results that an equation returns unchanged by its operands."""
    # A scan over layers that also returns their parameters, as `nnx.scan` does, computes nothing
    # from them: their readers must not seem to depend on the scan.

    def results_of(eqn: Any) -> dict[int, Var]:
        # Collectives of a single replica are the identity.
        is_one = collectives and collective_of(eqn) is not None
        places = _forwarded_by_one_replica(eqn) if is_one else _forwarded_results(eqn)
        return {result: eqn.invars[operand] for result, operand in places.items()}

    return substituted(closed, results_of, drops=False)


def substituted(closed: Any, results_of: Callable[[Any], dict[int, Var]], *, drops: bool = True) -> Any:
    """Replaces results of equations, by number, by other variables, and drops these equations."""
    jaxpr, source = body_of(closed), dict[Var, Var]()

    def resolved(variables: Sequence[Var]) -> list[Var]:
        return [v if is_literal(v) else source.get(v, v) for v in variables]

    equations = []
    for eqn in jaxpr.eqns:
        if source:
            eqn = _with_operands(eqn, resolved(eqn.invars))
        results = results_of(eqn)
        source.update((eqn.outvars[i], v) for i, v in results.items())
        if not (results and drops):
            equations.append(eqn)
    replaced = jaxpr.replace(eqns=equations, outvars=resolved(jaxpr.outvars))
    return ClosedJaxpr(replaced, closed.consts)


def _with_operands(eqn: Any, operands: list[Var]) -> Any:
    changes = any(v is not before for v, before in zip(operands, eqn.invars, strict=True))
    return eqn.replace(invars=operands) if changes else eqn


def without(closed: Any, left_out: Callable[[Any], bool]) -> Any:
    """Rewrites a function without some equations with results that nothing reads."""
    jaxpr = body_of(closed)
    return ClosedJaxpr(jaxpr.replace(eqns=[eqn for eqn in jaxpr.eqns if not left_out(eqn)]), closed.consts)


def _forwarded_results(eqn: Any) -> dict[int, int]:
    """Maps results of an equation to the operands that they are: of a call its arguments, of a scan what it scans over."""
    if eqn.primitive.name in CALLS:
        return {} if collective_of(eqn) is not None else _arguments_returned(nested_jaxprs(eqn)[0])
    if eqn.primitive.name == "cond":
        each = [_arguments_returned(branch) for branch in nested_jaxprs(eqn)]
        return {i: 1 + j for i, j in each[0].items() if all(other.get(i) == j for other in each)}
    if eqn.primitive.name == "scan":
        body = nested_jaxprs(eqn)[0]
        # Operands are constants, then the carry, then what is scanned over; results the carry, then what is stacked.
        first = number_not_scanned(eqn.invars, body_of(body).invars)
        carry = number_not_scanned(eqn.outvars, body_of(body).outvars)
        returned = _arguments_returned(body).items()
        return {i: j for i, j in returned if (i >= carry and j >= first) or j == i + first - carry < first}
    return {}


def _forwarded_by_one_replica(eqn: Any) -> dict[int, int]:
    """Maps results to operands as `_forwarded_results`, for a collective."""
    body = body_of(nested_jaxprs(eqn)[0])
    if any(inner.primitive.name != "optimization_barrier" for inner in body.eqns):
        return {}
    return {i: place for i, place in enumerate(operands_of_results(eqn)) if place is not None}


def operands_of_results(eqn: Any) -> list[int | None]:
    """Finds the operand of each result of a collective; None where the jaxpr does not show it."""
    # JAX drops results that nothing reads, but their operands only if they are computed separately.
    body = body_of(nested_jaxprs(eqn)[0])
    place = {v: i for i, v in enumerate(body.invars)}
    made_by = {v: (inner, i) for inner in body.eqns for i, v in enumerate(inner.outvars)}

    def source(v: Var) -> int | None:
        while not is_literal(v) and v not in place:
            inner, i = made_by[v]
            read = [operand for operand in inner.invars if not is_literal(operand)]
            if len(inner.invars) == len(inner.outvars):
                v = inner.invars[i]
            elif len(read) == 1:
                (v,) = read
            else:
                return None
        return None if is_literal(v) else place[v]

    return [source(v) for v in body.outvars]


def number_not_scanned(outside: Sequence[Var], inside: Sequence[Var]) -> int:
    """Counts the variables of a scan that its body sees whole, not row by row: by rank, as names differ by JAX version."""
    return sum(a.aval.ndim == b.aval.ndim for a, b in zip(outside, inside, strict=True))


def _arguments_returned(closed: Any) -> dict[int, int]:
    """Maps results of a function to the arguments that they are."""
    jaxpr = body_of(closed)
    place = {v: i for i, v in enumerate(jaxpr.invars)}
    made_by = {v: (number, i) for number, eqn in enumerate(jaxpr.eqns) for i, v in enumerate(eqn.outvars)}
    results_of = functools.cache(lambda number: _forwarded_results(jaxpr.eqns[number]))

    def argument(v: Var) -> int | None:
        while not is_literal(v) and v in made_by:
            number, i = made_by[v]
            if (operand := results_of(number).get(i)) is None:
                return None
            v = jaxpr.eqns[number].invars[operand]
        return None if is_literal(v) else place.get(v)

    return {i: found for i, v in enumerate(jaxpr.outvars) if (found := argument(v)) is not None}


def entered(closed: Any, is_entered: Callable[[Any], bool]) -> Any:
    """Enters some of the calls of a function, also in what they call."""
    jaxpr, constants = body_of(closed), dict[Var, Any]()
    taken = set(jaxpr.invars)

    def made(v: Var) -> Var:
        # Jaxprs share variables: one that is called twice, and those that JAX derives of another (`jax.linearize`).
        v = jex.Var(v.aval) if v in taken else v
        taken.add(v)
        return v

    def equations_of(closed: Any, source: dict[Var, Var]) -> Iterator[Any]:
        body = body_of(closed)
        for v, value in zip(body.constvars, closed.consts, strict=True):
            source[v] = made(v)
            constants[source[v]] = value
        for eqn in body.eqns:
            operands = [v if is_literal(v) else source.get(v, v) for v in eqn.invars]
            if is_entered(eqn):
                called = nested_jaxprs(eqn)[0]
                inside = dict(zip(body_of(called).invars, operands, strict=True))
                yield from equations_of(called, inside)
                results = [v if is_literal(v) else inside.get(v, v) for v in body_of(called).outvars]
                source.update(zip(eqn.outvars, results, strict=True))
                continue
            results = [v if is_dropped(v) else made(v) for v in eqn.outvars]
            source.update(zip(eqn.outvars, results, strict=True))
            eqn = _with_operands(eqn, operands)
            yield eqn if results == eqn.outvars else eqn.replace(outvars=results)

    if not any(map(is_entered, jaxpr.eqns)):
        return closed
    source = dict[Var, Var]()
    equations = list(equations_of(closed, source))
    results = [v if is_literal(v) else source.get(v, v) for v in jaxpr.outvars]
    return ClosedJaxpr(jaxpr.replace(constvars=[*constants], eqns=equations, outvars=results), [*constants.values()])


def all_equations(closed: Any) -> Iterator[Any]:
    """Iterates over the equations of a jaxpr, those of the functions and loops in it included."""
    for eqn in body_of(closed).eqns:
        yield eqn
        for inner in nested_jaxprs(eqn):
            yield from all_equations(inner)


def uses_primitive(eqn: Any, *names: str) -> bool:
    """Returns whether an equation, or one nested in it, applies one of these primitives."""
    return eqn.primitive.name in names or any(contains_primitive(j, *names) for j in nested_jaxprs(eqn))


def contains_primitive(closed: Any, *names: str) -> bool:
    """Returns whether a jaxpr applies one of these primitives anywhere."""
    return not _primitives_in(body_of(closed)).isdisjoint(names)


def _primitives_in(jaxpr: Any) -> frozenset[str]:
    found = _PRIMITIVES.get(jaxpr)  # most functions that a step calls are of `jax.numpy`, one jaxpr for all calls
    if found is None:
        nested = [_primitives_in(body_of(inner)) for eqn in jaxpr.eqns for inner in nested_jaxprs(eqn)]
        found = _PRIMITIVES[jaxpr] = frozenset(eqn.primitive.name for eqn in jaxpr.eqns).union(*nested)
    return found


_PRIMITIVES: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()


def nested_jaxprs(eqn: Any) -> list[Any]:
    """Lists the jaxprs of an equation, closed: a loop's body, the branches of a condition, a called function."""
    params = eqn.params
    return (
        [params["jaxpr"]]
        if eqn.primitive.name in ("jit", "pjit")
        else list(jaxprs_in(params.values()))
        if params
        else []
    )


def jaxprs_in(params: Iterable[Any]) -> Iterator[Any]:
    """Iterates over the jaxprs among an equation's parameters, closed; enters tuples and lists."""
    for param in params:
        if isinstance(param, ClosedJaxpr):
            yield param
        elif isinstance(param, jex.Jaxpr):
            yield ClosedJaxpr(param, ())
        elif isinstance(param, tuple | list):
            yield from jaxprs_in(param)


def effects_of(closed: Any) -> list[Any]:
    """Finds the equations that do more than compute: prints, callbacks, reads and writes of a `jax.Ref`."""
    return [eqn for eqn in body_of(closed).eqns if _effect_names(eqn)]


def is_print_or_callback(eqn: Any) -> bool:
    """Returns whether an equation's only effects are calls of the host."""
    return all(name.endswith(("DebugEffect", "IOEffect")) for name in _effect_names(eqn))


def _effect_names(eqn: Any) -> list[str]:
    # By name, as JAX exports no effect types. A collective counts as one with an effect on its axis, and has none.
    return [name for effect in eqn.effects if (name := type(effect).__name__) != "NamedAxisEffect"]


def needed(
    closed: Any, wanted: Iterable[Var], given: Collection[Var], effects: Sequence[Any] = ()
) -> tuple[list[Any], set[Var]]:
    """Lists the equations that `wanted` and `effects` need, in order, and all variables read."""
    reads = {v for v in wanted if not is_literal(v)}
    equations = []
    for eqn in reversed(body_of(closed).eqns):
        if any(eqn is effect for effect in effects) or any(v in reads and v not in given for v in eqn.outvars):
            equations.append(eqn)
            reads.update(v for v in eqn.invars if not is_literal(v))
    return equations[::-1], reads


def subfunction(
    closed: Any, given: Sequence[Var], wanted: Sequence[Var], effects: Sequence[Any] = ()
) -> Callable[[Sequence[jax.Array]], list[Any]]:
    """Cuts out the function that computes the variables `wanted` from `given`, with these effects and nothing else."""
    return functools.partial(run, piece(closed, given, needed(closed, wanted, set(given), effects)[0], wanted))


def run(closed: Any, arguments: Sequence[Any]) -> list[Any]:
    """Evaluates a traced function, equation by equation."""
    return list(jex.jaxpr_as_fun(closed)(*arguments))


def call(closed: Any, arguments: Sequence[Any]) -> list[Any]:
    """Calls a traced function, as one equation of the trace that is being made."""
    # A call of `jax.jit` would trace the function again: its equation is made of that of another function.
    jaxpr = body_of(closed)
    if not all(map(is_print_or_callback, jaxpr.eqns)):  # a `jax.Ref` is named by its place among the arguments
        return run(closed, arguments)
    jaxpr = jaxpr.replace(
        constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=jaxpr.debug_info.with_unknown_names()
    )
    (eqn,) = body_of(jax.make_jaxpr(_another)(0.0)).eqns
    params = {**eqn.params, "jaxpr": ClosedJaxpr(jaxpr, ()), "name": _CALLED}
    for name, value in eqn.params.items():
        if name.startswith("in_") or name == "donated_invars":
            params[name] = value * len(jaxpr.invars)
        elif name.startswith("out_"):
            params[name] = value * len(jaxpr.outvars)
    results = eqn.primitive.bind(*closed.consts, *arguments, **params)
    known = values_at_start(closed, arguments)
    # What is handed on unchanged stays the same object, as readers ask by identity what has changed.
    return [known[v] if is_in(v, known) else x for v, x in zip(jaxpr.outvars, results, strict=True)]


def is_called(eqn: Any) -> bool:
    """Returns whether an equation is one of `call`."""
    return eqn.primitive.name in ("jit", "pjit") and eqn.params.get("name") == _CALLED


_CALLED, _another = "jdist_called", jax.jit(lambda x: -x)


def piece(closed: Any, given: Sequence[Var], equations: list[Any], wanted: Sequence[Var]) -> Any:
    """Cuts out these equations, as a function from `given` to `wanted`."""
    jaxpr = body_of(closed)
    unnamed = jaxpr.debug_info.with_unknown_names()
    part = jaxpr.replace(invars=list(given), outvars=list(wanted), eqns=equations, debug_info=unnamed)
    return ClosedJaxpr(part, closed.consts)


def inlined(closed: Any, arguments: Sequence[Any], rules: dict[str, Callable[..., list[Any] | None]]) -> list[Any]:
    """Evaluates a jaxpr and inlines its calls (`jax.jit`, `custom_jvp`, `checkpoint`)."""

    def rule(eqn: Any, operands: list[Any]) -> list[Any] | None:
        # Of `rules` one, `(equation, operands) -> results`, replaces a primitive; None keeps the usual evaluation.
        results = rules[eqn.primitive.name](eqn, operands) if eqn.primitive.name in rules else None
        if results is None and eqn.primitive.name in CALLS:
            return inlined(nested_jaxprs(eqn)[0], operands, rules)
        return results

    return evaluated(closed, arguments, rule)


def evaluated(closed: Any, arguments: Sequence[Any], rule: Callable[[Any, list[Any]], list[Any] | None]) -> list[Any]:
    """Evaluates a jaxpr, some equations by `rule(equation, operands)`; None evaluates one as usual."""
    known = values_at_start(closed, arguments)
    for eqn in body_of(closed).eqns:
        operands = [value_of(v, known) for v in eqn.invars]
        results = rule(eqn, operands)
        if results is None:
            results = apply_equation(closed, eqn, operands)
        known.update(zip(eqn.outvars, results, strict=True))
    return [value_of(v, known) for v in body_of(closed).outvars]


CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "checkpoint",
    "remat2",
    "eval_jaxpr",
}


def apply_equation(closed: Any, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Computes the results of one equation; None for those that nothing reads."""
    given = {v: x for v, x in zip(eqn.invars, operands, strict=True) if not is_literal(v)}
    wanted = [v for v in eqn.outvars if not is_dropped(v)]
    results = iter(run(piece(closed, list(given), [eqn], wanted), list(given.values())))
    return [None if is_dropped(v) else next(results) for v in eqn.outvars]


def values_at_start(closed: Any, arguments: Sequence[Any]) -> dict[Var, Any]:
    """Maps the variables that no equation writes, arguments and constants, to their values."""
    jaxpr = body_of(closed)
    return dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arguments], strict=True))


def value_of(v: Var, known: dict[Var, Any]) -> Any:
    """Looks up the value of an operand: of a literal its own, of a variable the known one."""
    return v.val if is_literal(v) else known[v]


def struct_of(v: Var) -> jax.ShapeDtypeStruct:
    """Describes a variable's value by shape and dtype."""
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)


def is_literal(v: Var) -> bool:
    """Returns whether an operand is a constant written into the jaxpr."""
    return isinstance(v, jex.Literal)


def is_in(v: Var, variables: Collection[Var]) -> bool:
    """Returns whether an operand is one of these variables; a constant written into the jaxpr is not."""
    return not is_literal(v) and v in variables


def is_dropped(v: Var) -> bool:
    """Returns whether nothing reads a result of an equation."""
    return isinstance(v, jex.DropVar)
