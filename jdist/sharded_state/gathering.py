"""Gradients by a replica's parts of the parameters: each is gathered inside the differentiated function, where it is used.

The function is written over whole arrays and traced so. Run again on parts, it gathers each right before its use: an array
that a `lax.scan` goes over layer by layer in the scan's body, one layer at a time. The transpose of a gather is the sum over
the replicas, and each receives its part of it, so a gradient comes in parts, summed. The backward pass gathers again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.core.collective_marks import Collective, Gather, emit, is_own_part, line_of, own_part
from jdist.core.context import current_trace, tracing
from jdist.core.division import FormsByPath
from jdist.core.layout import Form, Layout
from jdist.core.sharded_leaf import is_sharded_leaf
from jdist.jaxpr import graph
from jdist.jaxpr.phases import Split
from jdist.sharded_state.on_parts import EvaluationOnParts, Part
from jdist.step.program_spec import Pure
from jdist.typing import PyTree

READ_OUTSIDE = "read outside of the step's own jdist.value_and_grad"
Differentiate = Callable[[Callable[..., Any]], Callable[..., Any]]


def gathering(pure: Pure, by_path: FormsByPath, gathers: list[Gather]) -> Pure:
    """Makes a step that takes gradients of parts, and notes its gathers in `gathers`."""

    def in_parts(state: PyTree, batches: PyTree, others: Any) -> Any:
        trace = current_trace()
        assert trace is not None  # a step is split under one
        gathers.clear()
        names = {id(x): path for path, x in zip(paths_of(state), jax.tree.leaves(state), strict=True)}
        with tracing(dataclasses.replace(trace, in_parts=GradientsOfParts(by_path, gathers, names))):
            # The parts follow the further arguments; the step does not read them.
            return pure(state, batches, others[0])

    return in_parts


@dataclass(frozen=True)
class GradientsOfParts:
    """The gradients of `jdist.value_and_grad` where parameters are in parts."""

    by_path: FormsByPath  # how arrays are cut
    gathers: list[Gather] = field(hash=False, compare=False)  # gathers are noted here
    # paths of the state's leaves, by the `id` of their tracers
    names: dict[int, str] = field(hash=False, compare=False)
    # `id`s of the tracers of further arrays, which are not in parts
    whole: frozenset[int] = frozenset()

    def leaving(self, arrays: Iterable[Any]) -> GradientsOfParts:
        """Takes the gradients by some arrays whole."""
        return dataclasses.replace(self, whole=frozenset(map(id, arrays)))

    @property
    def layout(self) -> Layout:
        return self.by_path.layout

    def forms(self, tree: PyTree) -> dict[str, Form]:
        """Finds how leaves with gradients in parts are stored, by path."""
        found = {}
        for path, x in jax.tree.leaves_with_path(tree):
            if (
                isinstance(x, jax.Array | np.ndarray)
                and jnp.issubdtype(x.dtype, jnp.inexact)
                and id(x) not in self.whole
            ):
                at = jax.tree_util.keystr(path)
                form = self.by_path.of_leaf(self.names.get(id(x)), x.shape) or self.by_path.find(at, x.shape, x.dtype)
                found |= {at: form} if form.is_cut else {}
        return found

    def fits(self, grads: PyTree, tree: PyTree) -> bool:
        """Returns whether gradients are where the leaves are that they were taken by, so that parts among them can be told."""
        forms = self.forms(tree)
        shapes = {jax.tree_util.keystr(path): jnp.shape(x) for path, x in jax.tree.leaves_with_path(tree)}
        shapes |= {path: form.part(self.layout.num_parts) for path, form in forms.items()}
        found = jax.tree.leaves_with_path(grads)
        return all(shapes.get(jax.tree_util.keystr(path)) == jnp.shape(x) for path, x in found)

    def take(
        self,
        differentiate: Differentiate,
        fun: Callable[..., Any],
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        argnums: Sequence[int],
    ) -> Any:
        """Differentiates a function of full arrays by this replica's parts of them."""
        # Gradients of arrays in parts are parts, summed over the replicas among which they are
        # spread.
        forms: dict[int, Form] = {}  # by place among all leaves
        names: dict[int, str] = {}
        by = set[int]()
        cut = []
        for i, arg in enumerate(args):
            own = self.forms(arg) if i in argnums else {}
            leaves, treedef = jax.tree.flatten_with_path(arg)
            first = len(names)
            by |= set(range(first, first + len(leaves))) if i in argnums else set()
            forms |= {
                first + n: own[jax.tree_util.keystr(path)]
                for n, (path, _) in enumerate(leaves)
                if jax.tree_util.keystr(path) in own
            }
            names |= {
                first + n: self.names.get(id(x), jax.tree_util.keystr(path)) for n, (path, x) in enumerate(leaves)
            }
            parts = [
                own_part(functools.partial(self.layout.own_part, form=form), x) if (form := forms.get(first + n)) else x
                for n, (_, x) in enumerate(leaves)
            ]
            cut.append(jax.tree.unflatten(treedef, parts))
        of_parts = on_parts(self.layout, fun, forms, names, self.gathers, differentiated=by)
        return differentiate(of_parts)(*cut, **kwargs)

    def reduce(
        self, value: jax.Array, grads: list[jax.Array], forms: Sequence[Form | None], op: Any
    ) -> tuple[Any, Any]:
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


def on_parts(
    layout: Layout,
    fun: Callable[..., Any],
    # of the leaves given in parts, by place among all leaves of the arguments
    forms: Mapping[int, Form],
    names: Mapping[int, str],  # of the same leaves
    gathers: list[Gather],  # gathers are noted here
    why: str = "where the loss uses it",  # where a gather happens, in words
    *,
    # leaves by which gradients are taken, by place among all leaves
    differentiated: Collection[int] = (),
    gathers_again: bool = True,  # in the backward pass
) -> Callable[..., Any]:
    """Wraps a function of full arrays as one of this replica's parts of some of them."""

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray | np.generic)]
        shapes = [jax.ShapeDtypeStruct(forms[i].of, leaves[i].dtype) if i in forms else leaves[i] for i in places]
        is_number: list[bool] = []
        others: list[Any] = []
        trees: list[Any] = []

        def flat(*arrays: Any) -> list[Any]:
            filled = list(leaves)
            for i, x in zip(places, arrays, strict=True):
                filled[i] = x
            args, kwargs = jax.tree.unflatten(treedef, filled)
            results, tree = jax.tree.flatten(fun(*args, **kwargs))
            trees[:], is_number[:] = [tree], map(_is_number, results)
            others[:] = [None if _is_number(x) else x for x in results]  # no tracer may outlive its trace
            return [x for x in results if _is_number(x)]

        closed = jax.make_jaxpr(flat)(*shapes)

        given = [Part(leaves[i], forms[i], leaves[i].dtype, names[i]) if i in forms else leaves[i] for i in places]
        values = iter(
            EvaluationOnParts(
                layout,
                closed,
                gathers,
                why,
                differentiated=[i in differentiated for i in places],
                gathers_again=gathers_again,
            ).run(given)
        )
        return jax.tree.unflatten(trees[0], [next(values) if n else x for n, x in zip(is_number, others, strict=True)])

    return run


def paths_of(state: PyTree) -> list[str]:
    """Lists the paths of a state's leaves, as `strategy.report` writes them."""
    paths = jax.tree.leaves_with_path(state, is_leaf=is_sharded_leaf)
    return [jax.tree_util.keystr(path).removeprefix(".") or "itself" for path, _ in paths]


def gathered_at_start(split: Split, state: PyTree, numbers: Sequence[int]) -> list[Gather]:
    """Describes the leaves, of these numbers, that are gathered before anything else: each with what reads it first."""
    traced, paths, found = split.traced, paths_of(state), []
    late = traced.depends(traced.combined)
    for i in numbers:
        v = traced.state[i]
        readers = [eqn for eqn in graph.body_of(traced.closed).eqns if any(x is v for x in eqn.invars)]
        readers = [
            eqn for eqn in readers if not is_own_part(eqn) and not any(graph.is_in(x, late) for x in eqn.outvars)
        ]
        why = f" ({readers[0].primitive.name})" if readers else ""
        num_bytes = math.prod(v.aval.shape) * v.aval.dtype.itemsize
        why = f"whole, from the step's start: {READ_OUTSIDE}{why}"
        found.append(Gather(paths[i], why, num_bytes, line_of(readers[0]) if readers else ""))
    return found


def _is_number(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic | int | float | complex)
