"""A step -> its gradient part and its update part.

A step is traced once with a recorder in place, which keeps what reaches a *cut* and hands out placeholders for what
comes back from it. What depends on a placeholder belongs to the update part; all else belongs to the gradient part.

`at="gradient"` cuts where `jdist.value_and_grad` combines the replicas' gradients. Everything a step does with a
combined gradient (clipping, logging its norm, the update) is then done once, on the gradient of the whole batch: this
is what gradient accumulation needs. `at="update"` cuts where an optimiser is called, for strategies whose parameters
live elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.core
import jax.numpy as jnp
import optax

from jdist import dataflow
from jdist.context import ReplicaTrace, tracing
from jdist.errors import BoundaryError
from jdist.state import map_optimizers, optimizer, unmarked_optimizer
from jdist.strategy import Strategy

PyTree = Any
Step = Callable[..., tuple[PyTree, PyTree]]


@dataclass(frozen=True)
class Cut:
    """One place where a step was cut: the arrays that went in, the placeholders handed out, and how to combine."""

    kind: Literal["gradient", "count", "applied", "update"]
    op: str
    inputs: list[jax.Array]
    placeholders: list[jax.Array]
    tx: optax.GradientTransformationExtraArgs | None = None
    treedef: Any = None


@dataclass
class _Recorder:
    at: str
    num_microbatches: int
    microbatch: jax.Array
    cuts: list[Cut] = field(default_factory=list)

    def _cut(self, kind: Any, op: str, inputs: Sequence[Any], outputs: Sequence[Any], **more: Any) -> list[jax.Array]:
        # A barrier gives every placeholder a variable of its own in the traced step, even where it is a constant.
        placeholders = [jax.lax.optimization_barrier(x) for x in outputs]
        self.cuts.append(Cut(kind, op, list(inputs), placeholders, **more))
        return placeholders

    def gradient(self, tree: PyTree, op: str) -> PyTree:
        leaves, treedef = jax.tree.flatten(tree)
        return jax.tree.unflatten(treedef, self._cut("gradient", op, leaves, leaves))

    def count(self, count: jax.Array) -> jax.Array:
        return self._cut("count", "sum", [count], [count])[0]

    def applied(self, grads: PyTree) -> None:
        self._cut("applied", "", jax.tree.leaves(grads), [])

    def update(self, tx: Any, grads: PyTree, opt_state: PyTree, params: PyTree, extra: dict[str, Any]) -> Any:
        leaves, treedef = jax.tree.flatten((grads, opt_state, params, extra))
        shapes = jax.eval_shape(lambda g, o, p, e: tx.update(g, o, p, **e), grads, opt_state, params, extra)
        outputs, out_treedef = jax.tree.flatten(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))
        return jax.tree.unflatten(out_treedef, self._cut("update", "", leaves, outputs, tx=tx, treedef=treedef))


@dataclass(frozen=True)
class Split:
    """A step in two parts, each a pure function of flat lists of arrays.

    In the order of execution: `counts`, once for each microbatch; `gradients`, with the summed counts, once for each
    microbatch, handing on `carried`; the cuts combined over microbatches and replicas; `update`, once.

    Attributes:
        cuts: op ("mean" or "sum") of each array that `gradients` returns for the cuts.
        gradients_of: how many of these arrays each gradient gave, its loss first.
        carried: indices of the state's leaves that the gradient part writes itself (batch statistics, counters).
        crossing: what else the update part reads from the gradient part: paths of the results that need each.
        read: indices of the state's leaves that the gradient part reads.
        own: for each output of the update part whether it may differ between replicas; False for the others.
        counts: `(state, batch, others, microbatch) -> counts`, the weights that masked means divide by.
        gradients: `(state, batch, others, microbatch, counts) -> (cut arrays, carried, crossing, outputs)`; of
            `outputs` only those that do not wait for the update, None in place of the rest.
        update: `(state, others, cut arrays, carried, crossing) -> (state, outputs)`, with the rest of `outputs`.
    """

    cuts: tuple[str, ...]
    gradients_of: tuple[int, ...]
    carried: tuple[int, ...]
    crossing: tuple[str, ...]
    read: tuple[int, ...]
    own: tuple[bool, ...]
    counts: Callable[..., list[jax.Array]]
    gradients: Callable[..., tuple[list[jax.Array], list[jax.Array], list[jax.Array], list[jax.Array | None]]]
    update: Callable[..., tuple[list[jax.Array], list[jax.Array | None]]]
    state_treedef: Any
    outputs_treedef: Any


def split(
    strategy: Strategy,
    step: Step,
    state: PyTree,
    batch: PyTree,
    others: PyTree = (),
    *,
    at: Literal["gradient", "update"] = "gradient",
    num_microbatches: int = 1,
    needs_cut: bool = True,
    otherwise: str = "leave `accumulate` at 1",
) -> Split:
    """Traces a step once and splits it.

    Args:
        strategy: the strategy that the step runs under; its axes are bound by the caller.
        step: `(state, batch, others) -> (state, outputs)`, pure.
        state: pytree of arrays or tracers.
        batch: one microbatch; pytree of arrays or tracers.
        others: further arguments, the same for all microbatches.
        at: where to cut.
        num_microbatches: how many microbatches the gradient part will run over.
        needs_cut: whether to refuse a step without a cut; all of such a step but what its update part computes from
            the old state alone is gradient part.
        otherwise: what an error tells the user to do instead of writing the step anew.

    Returns:
        The two parts.

    Raises:
        BoundaryError: the step calls no gradient (or optimiser) at its own level, or a gradient in it depends on what
            an earlier one of the same step has updated.
    """
    cuts: list[Cut] = []
    step = _marking_optimizers(step)

    def traced(state: PyTree, batch: PyTree, others: PyTree, microbatch: jax.Array) -> Any:
        recorder = _Recorder(at, num_microbatches, microbatch)
        with tracing(ReplicaTrace(strategy, recorder=recorder)):
            new_state, outputs = step(state, batch, others)
        cuts.extend(recorder.cuts)
        return (new_state, outputs), [cut.inputs for cut in cuts], [cut.placeholders for cut in cuts]

    closed, shapes = jax.make_jaxpr(traced, return_shape=True)(state, batch, others, jnp.int32(0))
    # A value that was kept inside an inner trace is no variable of this one; JAX takes it for a constant.
    if any(isinstance(const, jax.core.Tracer) for const in closed.consts):
        raise BoundaryError(
            "the step calls `jdist.value_and_grad`, a masked `jdist.mean` or its optimiser inside a `lax.scan`, "
            "`lax.cond`, `jax.jit` or `jax.checkpoint` of its own, where it cannot be split. "
            "Call it in the step itself: let the inner function return the loss of each example and take the mean "
            f"outside of it; or {otherwise}."
        )
    if needs_cut and not any(cut.kind == at for cut in cuts):
        what = "`jdist.value_and_grad` or `jdist.grad`" if at == "gradient" else "an optimiser"
        hint = (
            "Change `jax.value_and_grad` to `jdist.value_and_grad` (a DynamicScale takes gradients of its own and "
            "cannot be split)."
            if at == "gradient"
            else "Change `tx` to `jdist.optimizer(tx)`."
        )
        raise BoundaryError(f"the step calls {what} nowhere, so there is nothing to split. {hint}")
    return _Analysis(dataflow.forwarded(closed), shapes[0], cuts, state, batch, others, otherwise).split()


class _Analysis:
    """Sorts the variables of a traced step into those of the gradient part and those of the update part."""

    def __init__(
        self, closed: Any, shapes: Any, cuts: list[Cut], state: PyTree, batch: PyTree, others: PyTree, otherwise: str
    ):
        self.closed, self.cuts, self.otherwise = closed, cuts, otherwise
        jaxpr = dataflow.body_of(closed)
        invars, outvars = iter(jaxpr.invars), iter(jaxpr.outvars)
        self.state = _take(invars, len(jax.tree.leaves(state)))
        self.batch = _take(invars, len(jax.tree.leaves(batch)))
        self.others = _take(invars, len(jax.tree.leaves(others)))
        self.microbatch = next(invars)
        self.new_state_shape, self.outputs_shape = shapes
        self.new_state = _take(outvars, len(jax.tree.leaves(self.new_state_shape)))
        self.outputs = _take(outvars, len(jax.tree.leaves(self.outputs_shape)))
        self.inputs = [_take(outvars, len(cut.inputs)) for cut in cuts]
        self.placeholders = [_take(outvars, len(cut.placeholders)) for cut in cuts]

        self.late_sources = self._flat(self.placeholders, lambda cut: cut.kind != "count")
        self.late = dataflow.dependents(closed, self.late_sources)
        # A print or a callback belongs to the part in which what it shows is known.
        self.late_effects, self.early_effects = [], []
        for eqn in dataflow.effects_of(closed):
            if not dataflow.is_print_or_callback(eqn):
                raise BoundaryError(
                    f"the step reads or writes a `jax.Ref` (`{eqn.primitive.name}`), so it cannot be split. Compute with "
                    "arrays, or leave `accumulate` at 1."
                )
            is_late = any(v in self.late for v in eqn.invars if _is_var(v))
            (self.late_effects if is_late else self.early_effects).append(eqn)
        # An update part that runs where the parameters live knows no replica's number; one that runs on the replicas does.
        elsewhere = any(cut.kind == "update" for cut in cuts)
        self.varying = dataflow.dependents(
            closed,
            [*self.batch, self.microbatch],
            starts=lambda eqn: elsewhere and dataflow.uses_primitive(eqn, "axis_index"),
        )

    def _flat(self, lists: list[list[Any]], which: Callable[[Cut], bool]) -> list[Any]:
        return [v for cut, vs in zip(self.cuts, lists, strict=True) if which(cut) for v in vs]

    def split(self) -> Split:
        self._check_order()
        # The gradient part writes a leaf of the state where it depends on the batch and on no placeholder.
        carried = tuple(
            i for i, v in enumerate(self.new_state) if _is_var(v) and v in self.varying and v not in self.late
        )
        carried_vars = [self.new_state[i] for i in carried]
        early = [_is_var(v) and v not in self.late for v in self.outputs]
        crossing, crossing_paths = self._crossing(set(carried_vars))

        counts_in = self._flat(self.inputs, lambda cut: cut.kind == "count")
        counts_out = self._flat(self.placeholders, lambda cut: cut.kind == "count")
        cut_in = self._flat(self.inputs, lambda cut: cut.kind == "gradient")
        cut_out = self._flat(self.placeholders, lambda cut: cut.kind == "gradient")
        ops = tuple(cut.op for cut in self.cuts if cut.kind == "gradient" for _ in cut.inputs)
        arguments = [*self.state, *self.batch, *self.others, self.microbatch]
        early_vars = [v for v, is_early in zip(self.outputs, early, strict=True) if is_early]
        late_vars = [v for v, is_early in zip(self.outputs, early, strict=True) if not is_early]

        self._check_not_called_again(counts_in, arguments)
        gradient_results = [*cut_in, *carried_vars, *crossing, *early_vars]
        run_counts = dataflow.subfunction(self.closed, arguments, counts_in)
        run_gradients = dataflow.subfunction(
            self.closed, [*arguments, *counts_out], gradient_results, self.early_effects
        )
        own = dataflow.own_of_replicas(self.closed, {*cut_out, *counts_out, *carried_vars})
        _, reads = dataflow.needed(
            self.closed, [*gradient_results, *counts_in], {*arguments, *counts_out}, self.early_effects
        )
        run_update = self._update_function(
            [*self.state, *self.others, *cut_out, *carried_vars, *crossing], [*self.new_state, *late_vars]
        )

        def counts(state: Any, batch: Any, others: Any, microbatch: Any) -> list[jax.Array]:
            return run_counts([*_leaves(state, batch, others), microbatch])

        def gradients(state: Any, batch: Any, others: Any, microbatch: Any, counts: Sequence[Any]) -> Any:
            out = iter(run_gradients([*_leaves(state, batch, others), microbatch, *counts]))
            sizes = len(cut_in), len(carried_vars), len(crossing)
            return *(_take(out, n) for n in sizes), [next(out) if is_early else None for is_early in early]

        def update(state: Any, others: Any, cut: Sequence[Any], carried: Sequence[Any], crossing: Sequence[Any]) -> Any:
            out = iter(run_update([*_leaves(state, others), *cut, *carried, *crossing]))
            return _take(out, len(self.new_state)), [None if is_early else next(out) for is_early in early]

        return Split(
            cuts=ops,
            gradients_of=tuple(len(cut.inputs) for cut in self.cuts if cut.kind == "gradient"),
            carried=carried,
            crossing=crossing_paths,
            read=tuple(i for i, v in enumerate(self.state) if v in reads),
            own=tuple(_is_var(v) and v in self.late and v in own for v in self.outputs),
            counts=counts,
            gradients=gradients,
            update=update,
            state_treedef=jax.tree.structure(self.new_state_shape),
            outputs_treedef=jax.tree.structure(self.outputs_shape),
        )

    def _check_order(self) -> None:
        number = 0
        for cut, inputs in zip(self.cuts, self.inputs, strict=True):
            if cut.kind == "applied":
                self._check_combined(inputs)
                continue
            number += cut.kind != "count"
            gradient = inputs if cut.kind != "update" else inputs[: self._num_gradient_leaves(cut)]
            if any(_is_var(v) and v in self.late for v in gradient):
                what = "a masked mean" if cut.kind == "count" else f"gradient number {number}"
                raise BoundaryError(
                    f"{what} of the step depends on an earlier gradient of the same step, or on what an update by it has "
                    "changed, so the step cannot be split into one gradient part and one update part. Compute all gradients "
                    "from the parameters as they came in, or make two steps of it that hand on in the state what the first "
                    f"has found, or {self.otherwise}."
                )

    def _check_combined(self, gradients: list[Any]) -> None:
        if any(_is_var(v) and v in self.varying and v not in self.late for v in gradients):
            raise BoundaryError(
                "an optimiser of the step is given gradients that did not come from `jdist.value_and_grad` or `jdist.grad`, so "
                "its call belongs to no part of the step. Take all gradients of the step by them (a DynamicScale takes "
                f"gradients of its own), or {self.otherwise}."
            )

    @staticmethod
    def _num_gradient_leaves(cut: Cut) -> int:
        return len(jax.tree.leaves(jax.tree.unflatten(cut.treedef, range(len(cut.inputs)))[0]))

    def _check_not_called_again(self, wanted: list[Any], given: list[Any]) -> None:
        equations, _ = dataflow.needed(self.closed, wanted, set(given))
        if any(eqn is effect for eqn in equations for effect in self.early_effects):
            raise BoundaryError(
                "the update, or the mask of a mean, needs what a callback of the step returned, and would call it once more. "
                "Call it outside of the step and pass the value as an argument, or leave `accumulate` at 1."
            )

    def _crossing(self, carried: set[Any]) -> tuple[list[Any], tuple[str, ...]]:
        """What the update part reads of the gradient part beside the cuts, and the results that need it."""
        results = [*self.new_state, *self.outputs]
        names = [
            jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_leaves_with_path((self.new_state_shape, self.outputs_shape))
        ]
        gradient_side = {v for v in self.varying if v not in self.late}
        given = {*self.state, *self.others, *self.late_sources, *carried, *gradient_side}
        wanted = [(v, name) for v, name in zip(results, names, strict=True) if not _is_var(v) or v not in gradient_side]
        wanted += [(v, "the optimiser") for v in self._flat(self.inputs, lambda cut: cut.kind == "update")]
        wanted += [(v, "a print or callback") for eqn in self.late_effects for v in eqn.invars]
        found: dict[Any, list[str]] = {}
        for v, name in wanted:
            if _is_var(v):
                _, reads = dataflow.needed(self.closed, [v], given)
                for read in reads & gradient_side - carried:
                    found.setdefault(read, []).append(name)
        order = sorted(found, key=lambda v: (found[v], v.count if isinstance(getattr(v, "count", None), int) else 0))
        return order, tuple(", ".join(dict.fromkeys(found[v])) for v in order)

    def _update_function(self, given: list[Any], wanted: list[Any]) -> Callable[[Sequence[Any]], list[Any]]:
        """The update part; under at="update" it calls each optimiser once its inputs are there."""
        stages = []
        known = list(given)
        for cut, inputs, placeholders in zip(self.cuts, self.inputs, self.placeholders, strict=True):
            if cut.kind == "update":
                stages.append((cut, dataflow.subfunction(self.closed, known, inputs)))
                known = [*known, *placeholders]
        self._check_not_called_again(wanted, known)
        finish = dataflow.subfunction(self.closed, known, wanted, self.late_effects)

        def run(values: Sequence[Any]) -> list[Any]:
            values = list(values)
            for cut, prepare in stages:
                grads, opt_state, params, extra = jax.tree.unflatten(cut.treedef, prepare(values))
                assert cut.tx is not None  # an update cut always has its optimiser
                values += jax.tree.leaves(cut.tx.update(grads, opt_state, params, **extra))
            return finish(values)

        return run


def _marking_optimizers(step: Step) -> Step:
    """The step with every optimiser that a dataclass in its state holds marked, and unmarked again on return."""

    def marked(state: PyTree, batch: PyTree, others: PyTree) -> tuple[PyTree, PyTree]:
        new_state, outputs = step(map_optimizers(optimizer, state), batch, others)
        return map_optimizers(unmarked_optimizer, new_state), outputs

    return marked


def _leaves(*trees: PyTree) -> list[jax.Array]:
    return [leaf for tree in trees for leaf in jax.tree.leaves(tree)]


def _take(items: Any, count: int) -> list[Any]:
    return [next(items) for _ in range(count)]


def _is_var(v: Any) -> bool:
    return not dataflow.is_literal(v)
