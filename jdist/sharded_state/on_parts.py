"""A traced function of whole arrays, run on this replica's parts of some of them: each is gathered where it is used."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from jdist.core.collective_marks import Gather, collective_of, gradient_number, line_of, note_gradient
from jdist.core.layout import Form, Layout
from jdist.jaxpr import graph
from jdist.support import xla

# Never kept for the backward pass: gathers, and what reshapes and casts their results. What is kept of such results that
# depend on the batch has a name.
_MADE_AGAIN = {
    "all_gather", "broadcast_in_dim", "convert_element_type", "dynamic_slice", "reshape", "shard_map", "slice", "squeeze",
    "transpose",
}  # fmt: skip
_KEPT = "jdist_kept"
_TOGETHER = 32 << 20  # bytes; smaller arrays are gathered at a time


@dataclass(frozen=True)
class Part:
    """This replica's part of an array."""

    value: jax.Array
    form: Form  # how the array is stored
    dtype: Any  # cast before the gather, as that is less to gather
    name: str  # its path in the state

    @property
    def num_bytes(self) -> int:
        """Bytes of the array once it is gathered."""
        return math.prod(self.form.of) * jnp.dtype(self.dtype).itemsize


class EvaluationOnParts:
    """An evaluation of a traced function of full arrays on parts of some of them."""

    # Values of parts alone are computed at each use. The rest is computed in stretches, which end
    # before an equation with a body of its own (a scan, a `jax.checkpoint`) and before more than
    # `_TOGETHER` is gathered. The backward pass gathers again for a stretch once it has the
    # gradient of the stretch's results; gathers of the forward pass wait until the previous stretch
    # begins. Otherwise a compiler may start all of them at once.

    def __init__(
        self,
        layout: Layout,
        closed: Any,
        gathers: list[Gather],  # gathers are noted here
        why: str = "where the loss uses it",  # where a gather happens, in words
        *,
        # by argument: whether gradients are taken by it, or by its source; None: all
        differentiated: Sequence[bool] | None = None,
        # False inside a user's `jax.checkpoint`, which decides itself which values to keep
        gathers_again: bool = True,
    ):
        self.layout, self.closed, self.gathers_again = layout, graph.entered(closed, _is_call), gathers_again
        self.gathers, self.why = gathers, why
        jaxpr = graph.body_of(self.closed)
        self.equations = jaxpr.eqns
        chosen = [True] * len(jaxpr.invars) if differentiated is None else differentiated
        sources = [v for v, is_source in zip(jaxpr.invars, chosen, strict=True) if is_source]
        self.differentiated = graph.dependents(self.closed, sources)
        self.order = {id(eqn): i for i, eqn in enumerate(jaxpr.eqns)}
        self.last_read = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not graph.is_literal(v)}
        self.last_read |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not graph.is_literal(v)}
        self.known: dict[Any, Any] = {}
        # Not what the function closes over: rows of a batch.
        constants = zip(jaxpr.constvars, self.closed.consts, strict=True)
        self.constants = {v for v, x in constants if not isinstance(x, Tracer)}
        self.of_parts: dict[Any, Any] = {}  # the equations of what depends on parts alone, by result

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        """Evaluates the function, on arrays and parts of arrays."""
        self.known = graph.values_at_start(self.closed, arguments)
        stretch: list[Any] = []
        gathered: dict[Any, int] = {}  # by the stretch, in bytes
        for number, eqn in enumerate(self.equations):
            with_parts = any(map(self.is_of_parts, eqn.invars))
            if with_parts and eqn.primitive.name == "convert_element_type" and self.is_narrowed(eqn):
                self.known[eqn.outvars[0]] = dataclasses.replace(
                    self.known[eqn.invars[0]], dtype=eqn.params["new_dtype"]
                )
            elif (
                noted := gradient_number(eqn)
            ) is not None:  # outside of what is computed again, where it would be lost
                self.compute(stretch, number)
                stretch, gathered = [], {}
                parts = [self.known.get(v) for v in eqn.invars]
                operands = [
                    x if isinstance(x, Part) else self.values([v])[0] for x, v in zip(parts, eqn.invars, strict=True)
                ]
                note_gradient(noted, list(map(_value, operands)))
            elif eqn.effects or (with_parts and eqn.primitive.name in ("scan", "checkpoint", "remat2")):
                self.compute(stretch, number)
                stretch, gathered = [], {}
                self.known.update(zip(eqn.outvars, self.apply_body(eqn), strict=True))
            elif with_parts and all(
                graph.is_literal(v) or v in self.constants or self.is_of_parts(v) for v in eqn.invars
            ):
                self.of_parts.update((v, eqn) for v in eqn.outvars)
            else:
                read = {v: self.known[v] for v in self.parts_read(eqn.invars)[1]}
                self.note(eqn, list(read.values()))
                new = {v: part.num_bytes for v, part in read.items() if v not in gathered}
                if new and gathered and sum(new.values()) + sum(gathered.values()) > _TOGETHER and self.gathers_again:
                    self.hold_back(stretch, list(new))
                    self.compute(stretch, number)
                    stretch, gathered = [], {}
                gathered.update(new)
                stretch.append(eqn)
        self.compute(stretch, len(self.equations))
        return self.values(graph.body_of(self.closed).outvars)

    def is_of_parts(self, v: Any) -> bool:
        """Returns whether a variable is an array in parts, or depends on such alone."""
        return not graph.is_literal(v) and (v in self.of_parts or isinstance(self.known.get(v), Part))

    def is_narrowed(self, eqn: Any) -> bool:
        """Returns whether an equation casts an array in parts so that gathers move less."""
        part, new = self.known.get(eqn.invars[0]), jnp.dtype(eqn.params["new_dtype"])
        is_part = isinstance(part, Part)
        return is_part and jnp.issubdtype(new, jnp.floating) and new.itemsize < jnp.dtype(part.dtype).itemsize

    def note(self, eqn: Any, read: Sequence[Any], why: str = "") -> None:
        """Notes that an equation reads these of its operands whole; `why` in place of what its name tells."""
        has_body = bool(graph.nested_jaxprs(eqn)) and eqn.primitive.name not in ("jit", "pjit")
        why = why or (f"whole, before a {eqn.primitive.name}" if has_body else self.why)
        self.gathers.extend(Gather(x.name, why, x.num_bytes, line_of(eqn)) for x in read if isinstance(x, Part))

    def parts_read(self, variables: Iterable[Any]) -> tuple[list[Any], list[Any]]:
        """Finds the equations of what depends on parts alone that variables need, and the parts among all that they read."""
        equations, parts, pending = (
            dict[int, Any](),
            dict[Any, None](),
            [v for v in variables if not graph.is_literal(v)],
        )
        while pending:
            v = pending.pop()
            if v in self.of_parts:
                eqn = self.of_parts[v]
                if id(eqn) not in equations:
                    equations[id(eqn)] = eqn
                    pending.extend(v for v in eqn.invars if not graph.is_literal(v))
            elif isinstance(self.known.get(v), Part):
                parts[v] = None
        return sorted(equations.values(), key=lambda eqn: self.order[id(eqn)]), list(parts)

    def hold_back(self, stretch: list[Any], parts: Sequence[Any]) -> None:
        """Has the gathers of these arrays wait until a stretch begins; one of its operands stands for that."""
        made = {v for eqn in stretch for v in eqn.outvars}
        reads = [v for eqn in stretch for v in eqn.invars if not graph.is_literal(v) and v not in made]
        first = next((v for v in reads if isinstance(self.known.get(v), Tracer) and _is_inexact(self.known[v])), None)
        if first is None:
            return
        values = [self.known[v].value for v in parts]
        self.known[first], values = jax.lax.optimization_barrier((self.known[first], values))
        self.known.update((v, dataclasses.replace(self.known[v], value=x)) for v, x in zip(parts, values, strict=True))

    def compute(self, stretch: list[Any], until: int) -> None:
        """Computes a stretch of equations; `until` is the number of the equation after it."""
        if not stretch:
            return
        wanted = [v for eqn in stretch for v in eqn.outvars if self.last_read.get(v, -1) >= until]
        self.known.update(zip(wanted, self.evaluated(stretch, wanted, self.gathers_again), strict=True))

    def values(self, variables: Sequence[Any]) -> list[Any]:
        """Returns the values of variables as whole arrays."""
        return self.evaluated([], variables, False)

    def evaluated(self, stretch: list[Any], wanted: Sequence[Any], gathers_again: bool) -> list[Any]:
        """Computes variables by a stretch of equations, with what these need of parts."""
        made = {v for eqn in stretch for v in eqn.outvars}
        operands = [v for v in (*wanted, *(v for eqn in stretch for v in eqn.invars)) if not graph.is_literal(v)]
        before, parts_read = self.parts_read(operands)
        # In an order that is the same in every process.
        reads = dict.fromkeys(
            [*operands, *(v for eqn in before for v in eqn.invars if not graph.is_literal(v)), *parts_read]
        )
        given = [v for v in reads if v in self.known and v not in made]
        originals = [self.known[v] for v in given]

        def run(*values: Any) -> list[Any]:
            known = dict(zip(given, map(self.whole, _like(originals, values)), strict=True))
            for eqn in [*before, *stretch]:
                results = graph.apply_equation(self.closed, eqn, [graph.value_of(v, known) for v in eqn.invars])
                if gathers_again and eqn.primitive.name in _MADE_AGAIN and not any(eqn is other for other in before):
                    results = [x if x is None else _kept(x) for x in results]
                known.update(zip(eqn.outvars, results, strict=True))
            return [graph.value_of(v, known) for v in wanted]

        parts = [i for i, x in enumerate(originals) if isinstance(x, Part)]
        values = list(map(_value, originals))
        if not gathers_again or not parts:
            return run(*values)
        # Not by a batch: what is computed of it alone may have no derivative.
        by = [i for i, v in enumerate(given) if v in self.differentiated and _is_inexact(values[i])]
        return _gathering_again(run, values, by, parts)

    def whole(self, x: Any) -> Any:
        """Gathers an array in parts; its gradient is summed in the dtype of the part."""
        if not isinstance(x, Part):
            return x
        layout, form, dtype, own = self.layout, x.form, x.dtype, x.value.dtype
        # JAX's transpose of a gather is a `psum_scatter`.
        if dtype == own and not xla.gloo_scatters_wrongly():
            return layout.all_gather(x.value, form)

        def gathered(part: jax.Array) -> jax.Array:
            return layout.all_gather(part.astype(dtype), form)

        gather = jax.custom_vjp(gathered)
        # The primal of the forward pass does not call `gather` itself: what is kept for the backward pass depends on it.
        gather.defvjp(lambda part: (gathered(part), None), lambda _, g: (layout.sum_scatter_wide(g, form, own),))
        return gather(x.value)

    def apply_body(self, eqn: Any) -> list[Any]:
        """Computes an equation with a body or an effect of its own."""
        operands = [
            self.known[v] if not graph.is_literal(v) and isinstance(self.known.get(v), Part) else self.values([v])[0]
            for v in eqn.invars
        ]
        if not any(isinstance(x, Part) for x in operands) or eqn.primitive.name not in (
            "scan",
            "checkpoint",
            "remat2",
        ):
            self.note(eqn, operands)
            return graph.apply_equation(self.closed, eqn, list(map(self.whole, operands)))
        return self.scanned(eqn, operands) if eqn.primitive.name == "scan" else self.checkpointed(eqn, operands)

    def by_operand(self, eqn: Any) -> list[bool]:
        """Tells of each operand whether it depends on what gradients are taken by."""
        return [graph.is_in(v, self.differentiated) for v in eqn.invars]

    def checkpointed(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Computes a `jax.checkpoint` of the user's, which gathers again where it computes again."""
        body = graph.nested_jaxprs(eqn)[0]

        def run(*values: Any) -> list[Any]:
            inside = EvaluationOnParts(
                self.layout, body, self.gathers, self.why, differentiated=self.by_operand(eqn), gathers_again=False
            )
            return inside.run(_like(operands, values))

        params = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
        return jax.checkpoint(run, **params)(*map(_value, operands))

    def scanned(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Computes a scan; of stacked layers each is gathered in the iteration that uses it."""
        body = graph.nested_jaxprs(eqn)[0]
        inner = graph.body_of(body)
        first = graph.number_not_scanned(eqn.invars, inner.invars)
        carry = graph.number_not_scanned(eqn.outvars, inner.outvars)
        in_rows = [isinstance(x, Part) and x.form.of_layer is not None for x in operands[first:]]
        self.note(eqn, operands[:first], "whole, before a scan that uses it in every iteration")
        unlayered = [x for x, rows in zip(operands[first:], in_rows, strict=True) if not rows]
        self.note(eqn, unlayered, "whole, before a scan: it is not stored layer by layer")
        constants, start = (
            list(map(self.whole, operands[a:b])) for a, b in ((0, first - carry), (first - carry, first))
        )
        stacks = [x if rows else self.whole(x) for x, rows in zip(operands[first:], in_rows, strict=True)]

        def step(carried: list[Any], rows: list[Any]) -> Any:
            layers = [
                dataclasses.replace(x, value=row, form=x.form.of_layer) if isinstance(x, Part) else row
                for row, x in zip(rows, stacks, strict=True)
            ]
            why = "layer by layer in a scan"
            layer = EvaluationOnParts(
                self.layout,
                body,
                self.gathers,
                why,
                # What is carried may depend on it from the second iteration on.
                differentiated=[d or first - carry <= i < first for i, d in enumerate(self.by_operand(eqn))],
                gathers_again=self.gathers_again,
            )
            results = layer.run([*constants, *carried, *layers])
            return results[:carry], results[carry:]

        params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carried, stacked = jax.lax.scan(step, start, list(map(_value, stacks)), **params)
        return [*carried, *stacked]


def _is_call(eqn: Any) -> bool:
    """Returns whether an equation is a call by `jax.jit`, and not a collective of jdist."""
    is_mark = collective_of(eqn) is not None or gradient_number(eqn) is not None
    return eqn.primitive.name in ("jit", "pjit", "closed_call") and not is_mark


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Part) else x


def _like(operands: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Makes parts of values that stand for parts."""
    return [
        dataclasses.replace(x, value=value) if isinstance(x, Part) else value
        for x, value in zip(operands, values, strict=True)
    ]


def _kept(x: Any) -> Any:
    """Names a value that the backward pass may keep; keys are made again."""
    is_array = isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return checkpoint_name(x, _KEPT) if is_array else x


def _is_kept(primitive: Any, *_: Any, **params: Any) -> bool:
    """Returns whether the backward pass may keep what a primitive returns."""
    return primitive.name not in _MADE_AGAIN


def _gathering_again(
    run: Callable[..., list[Any]], values: list[Any], by: Sequence[int], parts: Sequence[int]
) -> list[Any]:
    """Computes a differentiated function; its backward pass gathers the arrays of `parts` again."""
    places: list[int] = []

    # All values are arguments: what the function closes over could be of a trace that is over once the backward pass is made.
    def forward(*values: Any) -> Any:
        def of_inexact(*xs: Any) -> list[Any]:
            known = dict(zip(by, xs, strict=True))
            return run(*(known.get(i, x) for i, x in enumerate(values)))

        differentiated = [values[i] for i in by]
        # `jax.checkpoint` makes the gathers part of the backward pass. They wait for the last saved
        # value and for the gradient, or the compiler would reuse the results of the first gathers.
        # `prevent_cse` would make all saved values wait: the compiler could no longer recompute
        # them where that takes less memory (4.6 GB instead of 3.2 for a transformer without a
        # checkpoint of its own).
        results, backward = jax.vjp(jax.checkpoint(of_inexact, policy=_is_kept, prevent_cse=False), *differentiated)
        kept = jax.tree.leaves(backward)
        own = [values[i] for i in parts]
        computed = [i for i, x in enumerate(kept) if not any(x is other for other in values)]
        places[:] = [i for i, x in enumerate(kept) if any(x is part for part in own)]
        # A gradient of the loss itself is known from the start, so what was kept last stands for the forward pass's end.
        places.extend(computed[-1:])
        return results, backward

    def backward(backward: Any, cotangents: Any) -> tuple[Any, ...]:
        leaves, treedef = jax.tree.flatten(backward)
        found, cotangents = jax.lax.optimization_barrier(([leaves[i] for i in places], cotangents))
        for i, x in zip(places, found, strict=True):
            leaves[i] = x
        grads = dict(zip(by, jax.tree.unflatten(treedef, leaves)(cotangents), strict=True))
        return tuple(grads.get(i) for i in range(len(values)))

    function = jax.custom_vjp(run)
    function.defvjp(forward, backward)
    return function(*values)
