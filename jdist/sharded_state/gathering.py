"""Gradients of a replica's parts of the parameters: each array is gathered inside the differentiated function, where it is used.

The function is written over whole arrays and traced so. Run again on parts, it gathers each right before its use: an array
that a `lax.scan` goes over layer by layer in the scan's body, one layer at a time. The transpose of a gather is the sum over
the replicas of which each receives its part, so a gradient comes in parts, summed. The backward pass gathers again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jdist.core.collective_marks import Collective, collective_of, emit, own_part
from jdist.core.context import current_trace, tracing
from jdist.core.sharded_leaf import Form, Layout
from jdist.jaxpr import graph
from jdist.step.program_spec import Pure

PyTree = Any
Differentiate = Callable[[Callable[..., Any]], Callable[..., Any]]

# Never kept for the backward pass: gathers, and what reshapes and casts their results. What is kept of such results that
# depend on the batch has a name.
_MADE_AGAIN = {
    "all_gather", "broadcast_in_dim", "convert_element_type", "dynamic_slice", "reshape", "slice", "squeeze", "transpose",
}  # fmt: skip
_KEPT = "jdist_kept"


def gathering(pure: Pure, layout: Layout) -> Pure:
    """Makes a step that takes gradients of parts; its further arguments are followed by the parts, which it does not read."""

    def in_parts(state: PyTree, batches: PyTree, others: Any) -> Any:
        trace = current_trace()
        assert trace is not None  # a step is split under one
        with tracing(dataclasses.replace(trace, in_parts=GradientsOfParts(layout))):
            return pure(state, batches, others[0])

    return in_parts


@dataclass(frozen=True)
class GradientsOfParts:
    """What `jdist.value_and_grad` does where parameters are in parts.

    Attributes:
        layout: how arrays are cut.
    """

    layout: Layout

    def forms(self, tree: PyTree) -> dict[str, Form]:
        """Finds how the leaves of which a gradient is taken in parts are stored, by path."""
        found = {}
        for path, x in jax.tree.leaves_with_path(tree):
            is_array = isinstance(x, jax.Array | np.ndarray)
            if is_array and jnp.issubdtype(x.dtype, jnp.inexact) and self.layout.is_spread(x.shape, x.dtype):
                found[jax.tree_util.keystr(path)] = self.layout.form(x.shape)
        return found

    def take(
        self,
        differentiate: Differentiate,
        fun: Callable[..., Any],
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        argnums: Sequence[int],
    ) -> Any:
        """Differentiates a function of whole arrays by this replica's parts of them.

        Returns:
            What `differentiate(fun)(*args, **kwargs)` returns, but that gradients of arrays in parts are parts, summed over
            the replicas among which they are spread.
        """
        forms: dict[int, Form] = {}  # by place among all leaves
        cut = []
        for i, arg in enumerate(args):
            own = self.forms(arg) if i in argnums else {}
            leaves, treedef = jax.tree.flatten_with_path(arg)
            first = len(jax.tree.leaves(args[:i]))
            forms |= {first + n: own[jax.tree_util.keystr(path)] for n, (path, _) in enumerate(leaves) if jax.tree_util.keystr(path) in own}
            parts = [own_part(self.layout.own_part, x) if first + n in forms else x for n, (_, x) in enumerate(leaves)]
            cut.append(jax.tree.unflatten(treedef, parts))
        return differentiate(self.of_parts(fun, forms))(*cut, **kwargs)

    def of_parts(self, fun: Callable[..., Any], forms: dict[int, Form]) -> Callable[..., Any]:
        """Makes the function of parts; `forms` by the place of a leaf among the leaves of its arguments."""

        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, treedef = jax.tree.flatten((args, kwargs))
            places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray | np.generic)]
            shapes = [
                jax.ShapeDtypeStruct(forms[i].of, leaves[i].dtype) if i in forms else leaves[i] for i in places
            ]
            results: list[Any] = []

            def flat(*arrays: Any) -> list[Any]:
                filled = list(leaves)
                for i, x in zip(places, arrays, strict=True):
                    filled[i] = x
                args, kwargs = jax.tree.unflatten(treedef, filled)
                results[:], tree = jax.tree.flatten(fun(*args, **kwargs))
                trees[:] = [tree]
                return [x for x in results if _is_number(x)]

            trees: list[Any] = []
            closed = jax.make_jaxpr(flat)(*shapes)
            is_number, others = [_is_number(x) for x in results], [None if _is_number(x) else x for x in results]
            results.clear()  # tracers of a trace that is over

            def evaluated(*arrays: jax.Array) -> list[Any]:
                given = [_Part(x, forms[i], x.dtype) if i in forms else x for i, x in zip(places, arrays, strict=True)]
                return _Evaluation(self.layout).run(closed, given, [isinstance(x, _Part) for x in given])

            arrays = [leaves[i] for i in places]
            kept = evaluated if _has_effects(closed) else jax.checkpoint(evaluated, policy=_is_kept)
            values = iter(kept(*arrays))
            return jax.tree.unflatten(
                trees[0], [next(values) if n else x for n, x in zip(is_number, others, strict=True)]
            )

        return run

    def reduce(self, value: jax.Array, grads: list[jax.Array], forms: Sequence[Form | None], op: Any) -> tuple[Any, Any]:
        """Combines a loss and gradients, some of them parts, into whole ones: one collective, as `reduce_gradients`."""
        trace = current_trace()
        assert trace is not None
        axes, n, k = trace.strategy.axes, trace.strategy.num_replicas, trace.num_microbatches
        between = tuple(axis for axis in axes if axis not in self.layout.axes)

        def body(*operands: jax.Array) -> list[jax.Array]:
            totals = [
                jax.lax.psum(x, axes)
                if form is None
                else self.layout.all_gather(jax.lax.psum(x, between) if between else x, form)
                for x, form in zip(operands, [None, *forms], strict=True)
            ]
            return [x / n if op == "mean" else x * jnp.asarray(k, x.dtype) for x in totals]

        value, *combined = emit(Collective("gradient", op), body, [value, *grads])
        return value, combined


@dataclass(frozen=True)
class _Part:
    """This replica's part of an array.

    Attributes:
        value: the part.
        form: how the array is stored.
        dtype: what the array is cast to once it is gathered; the cast then comes first, as that is less to gather.
    """

    value: jax.Array
    form: Form
    dtype: Any


class _Evaluation:
    """An evaluation of a traced function of whole arrays on parts of some of them."""

    def __init__(self, layout: Layout):
        self.layout = layout

    def gathered(self, part: _Part) -> jax.Array:
        """Gathers an array; its gradient is summed in the dtype of the part."""
        layout, form, dtype, own = self.layout, part.form, part.dtype, part.value.dtype
        if dtype == own:
            return layout.all_gather(part.value, form)

        @jax.custom_vjp
        def gather(x: jax.Array) -> jax.Array:
            return layout.all_gather(x.astype(dtype), form)

        gather.defvjp(lambda x: (gather(x), None), lambda _, g: (layout.sum_scatter(g.astype(own), form),))
        return gather(part.value)

    def run(self, closed: Any, arguments: Sequence[Any], of_weights: Sequence[bool]) -> list[Any]:
        """Evaluates a function.

        Args:
            closed: the function.
            arguments: arrays, and parts of arrays.
            of_weights: of each whether it depends on nothing but what is in parts, so that it can be made again.
        """
        jaxpr = graph.body_of(closed)
        known = graph.values_at_start(closed, arguments)
        weights = {v for v, flag in zip(jaxpr.invars, of_weights, strict=True) if flag}

        def is_weight(v: Any) -> bool:
            return graph.is_literal(v) or v in weights or v in jaxpr.constvars

        for eqn in jaxpr.eqns:
            operands = [graph.value_of(v, known) for v in eqn.invars]
            flags = [is_weight(v) for v in eqn.invars]
            # Not what is made of constants alone: zeros of a batch's shape and the like.
            made_of_weights = all(flags) and any(graph.is_in(v, weights) for v in eqn.invars)
            results = self.apply(closed, eqn, operands, flags)
            if made_of_weights:
                weights.update(eqn.outvars)
            elif eqn.primitive.name in _MADE_AGAIN:
                results = [x if x is None else _kept(x) for x in results]
            known.update(zip(eqn.outvars, results, strict=True))
        return [self.whole(graph.value_of(v, known)) for v in jaxpr.outvars]

    def whole(self, x: Any) -> Any:
        return self.gathered(x) if isinstance(x, _Part) else x

    def apply(self, closed: Any, eqn: Any, operands: list[Any], of_weights: list[bool]) -> list[Any]:
        """Computes the results of an equation."""
        name = eqn.primitive.name
        if any(isinstance(x, _Part) for x in operands):
            if name in ("jit", "pjit", "closed_call") and collective_of(eqn) is None:
                return self.run(graph.nested_jaxprs(eqn)[0], operands, of_weights)
            if name in ("checkpoint", "remat2"):
                return self.checkpointed(eqn, operands, of_weights)
            if name == "scan":
                return self.scanned(eqn, operands, of_weights)
            if name == "convert_element_type" and self.is_narrowed(eqn, operands[0]):
                return [dataclasses.replace(operands[0], dtype=eqn.params["new_dtype"])]
        return graph.apply_equation(closed, eqn, list(map(self.whole, operands)))

    def is_narrowed(self, eqn: Any, part: _Part) -> bool:
        """Whether a cast leaves less to gather."""
        new = jnp.dtype(eqn.params["new_dtype"])
        return jnp.issubdtype(new, jnp.floating) and new.itemsize < jnp.dtype(part.dtype).itemsize

    def checkpointed(self, eqn: Any, operands: list[Any], of_weights: list[bool]) -> list[Any]:
        """Computes a `jax.checkpoint` of the user's, which gathers again where it computes again."""
        body = graph.nested_jaxprs(eqn)[0]

        def run(*values: Any) -> list[Any]:
            return self.run(body, _like(operands, values), of_weights)

        params = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
        return jax.checkpoint(run, **params)(*map(_value, operands))

    def scanned(self, eqn: Any, operands: list[Any], of_weights: list[bool]) -> list[Any]:
        """Computes a scan; of stacked layers each is gathered in the step that uses it."""
        body = graph.nested_jaxprs(eqn)[0]
        inner = graph.body_of(body)
        first = graph.number_not_scanned(eqn.invars, inner.invars)
        carry = graph.number_not_scanned(eqn.outvars, inner.outvars)
        constants, start = (list(map(self.whole, operands[a:b])) for a, b in ((0, first - carry), (first - carry, first)))
        stacks = [
            x if not isinstance(x, _Part) else x if x.form.of_layer is not None else self.gathered(x)
            for x in operands[first:]
        ]
        # A carry depends on what the scan does with it.
        flags = [*of_weights[: first - carry], *[False] * carry, *of_weights[first:]]

        def step(carried: list[Any], rows: list[Any]) -> Any:
            layers = [
                _Part(row, x.form.of_layer, x.dtype) if isinstance(x, _Part) and x.form.of_layer is not None else row
                for row, x in zip(rows, stacks, strict=True)
            ]
            results = self.run(body, [*constants, *carried, *layers], flags)
            return results[:carry], results[carry:]

        params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carried, stacked = jax.lax.scan(step, start, list(map(_value, stacks)), **params)
        return [*carried, *stacked]


def _value(x: Any) -> Any:
    return x.value if isinstance(x, _Part) else x


def _like(operands: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Makes parts of values that stand for parts."""
    return [
        dataclasses.replace(x, value=value) if isinstance(x, _Part) else value
        for x, value in zip(operands, values, strict=True)
    ]


def _kept(x: Any) -> Any:
    """Names a value that the backward pass may keep; keys are made again."""
    is_array = isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return checkpoint_name(x, _KEPT) if is_array else x


def _is_kept(primitive: Any, *_: Any, **params: Any) -> bool:
    """Whether the backward pass may keep what a primitive returns."""
    return primitive.name not in _MADE_AGAIN


def _is_number(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic | int | float | complex)


def _has_effects(closed: Any) -> bool:
    """Whether a function prints or calls the host, which must not happen again in the backward pass."""
    return bool(graph.effects_of(closed))
