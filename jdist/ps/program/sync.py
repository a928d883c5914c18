"""Cuts a call of a step into the closures of synchronous mode; the servers average their gradients into one update.

The closures are to the call what microbatches are to gradient accumulation, only on several workers: each has its rows,
the counts that masked means divide by are summed over all of them beforehand, and what depends on the mean of the
gradients (a norm to clip by, a metric of the gradients) or on a total is computed by the coordinator from what the
closures report.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jdist.errors import BoundaryError
from jdist.jaxpr import graph
from jdist.jaxpr.phases import Phase
from jdist.jaxpr.split import axis_of_rows
from jdist.ps.program.function_plan import StepFunction
from jdist.ps.program.split_step import SplitStep
from jdist.ps.protocol.wire import mean_of_integers
from jdist.replica.gradients import all_finite
from jdist.step.microbatches import PhaseResults
from jdist.step.outputs import LOCAL, METRIC, OutputKind
from jdist.typing import PyTree


def make_sync_function(step: SplitStep, closures: int) -> StepFunction:
    """Makes the function of a step with calls that are cut into `closures` closures."""
    _check_keys(step)
    _check_phases(step)
    one = _Round(step, closures)
    return StepFunction(
        step=step, run=one.run, arguments=one.arguments, outputs=one.reported, cut=one.cut, combine=one.combine
    )


class _Round:
    """The closures of a call; their gradients make one update."""

    def __init__(self, step: SplitStep, closures: int):
        self._step, self._n = step, closures
        self._plan, self._accumulate = step.plan, step.spec.options.accumulate
        self._num_rows = step.num_batch_leaves
        leaves, self._treedef = jax.tree.flatten(step.arguments)
        self._num_leaves = len(leaves)
        *self._before, self._main = self._plan.split.phases
        first = len(leaves) - self._num_rows + sum(len(cut.shapes) for phase in self._before for cut in phase.cuts)
        # The operation and the whole shape of each array that the main phase pushes, by its number.
        self._cuts = dict(enumerate(_arrays_of_cuts(self._main), start=first))
        self._check_pushed()
        self._counts = jax.jit(self._count_function(leaves))
        counts = jax.eval_shape(self._counts, leaves)
        rows = [jax.ShapeDtypeStruct((x.shape[0] // closures, *x.shape[1:]), x.dtype) for x in leaves[: self._num_rows]]
        self.arguments = [*rows, *leaves[self._num_rows :], jax.ShapeDtypeStruct((), np.int32), *counts]
        whole, by_rows = PartitionSpec(), PartitionSpec(step.spec.strategy.axes)
        specs = [whole] * (len(step.read) + len(self.arguments))
        specs[len(step.read) : len(step.read) + self._num_rows] = [by_rows] * self._num_rows
        # From inputs and arguments to the pushed arrays, a flag and the closure's report. The flag says whether the
        # gradients are finite if a worker needs that for its loss scale; else True.
        self.run: Callable[[list[Any]], list[Any]] = jax.shard_map(
            self._on_replica, mesh=step.spec.strategy.mesh, in_specs=(specs,), out_specs=whole, check_vma=False
        )
        inputs = [step.update.shapes[i] for i in step.read]
        self.reported = jax.eval_shape(self.run, [*inputs, *self.arguments])[len(step.pushed) + 1 :]
        self._combine = jax.jit(self._combined)

    def cut(self, leaves: Sequence[Any]) -> list[list[Any]]:
        """Cuts the arguments of a call into those of each closure."""
        with jax.transfer_guard("allow"):
            counts = self._counts([np.asarray(x) for x in leaves])
        rows, others = [np.asarray(x) for x in leaves[: self._num_rows]], list(leaves[self._num_rows :])
        return [
            [*(x[i * len(x) // self._n : (i + 1) * len(x) // self._n] for x in rows), *others, np.int32(i), *counts]
            for i in range(self._n)
        ]

    def combine(self, reported: Sequence[Sequence[Any]]) -> tuple[list[np.ndarray], bool, list[np.ndarray]]:
        """Combines what the closures reported; see `function_plan.Combine`."""
        with jax.transfer_guard("allow"):
            scalars, finite, outputs = jax.device_get(self._combine([list(each) for each in reported]))
        return scalars, bool(finite), outputs

    def _check_pushed(self) -> None:
        ops = {self._cuts[j][0] for j in self._step.pushed if j in self._cuts}
        if wrong := ops & {"max", "min", "gather"}:
            raise BoundaryError(
                f"the state depends on what the step combines by {' and '.join(sorted(wrong))} over all rows. In "
                "synchronous mode servers average what workers push: put a sum or a mean into the state, or use "
                "`jdist.mirrored()`."
            )

    def _on_replica(self, values: list[Any]) -> list[Any]:
        step, split, traced = self._step, self._plan.split, self._plan.split.traced
        n, a = len(step.read), self._accumulate
        leaves, (number, *counts) = values[n : n + self._num_leaves], values[n + self._num_leaves :]
        state = step.filled(dict(zip(step.read, values[:n], strict=True)))
        old = jax.tree.leaves(state)
        batches, others = jax.tree.unflatten(self._treedef, leaves)
        numbers = [number * a + j for j in range(a)]
        operands, carried, outputs = self._run_phase(self._main, state, leaves, counts, numbers)
        # Servers take the mean; for a sum, a closure sends the number of closures times its value.
        cuts = [
            _together(op, values, whole, self._n)
            for (op, whole), values in zip(self._cuts.values(), operands, strict=True)
        ]
        begun = [old[split.carried[i].leaf] if split.carried[i].adds_up else None for i in self._main.carried]
        carried = [
            _together("mean", values, (), 1) if start is None else start + self._n * sum(x - start for x in values)
            for start, values in zip(begun, carried, strict=True)
        ]
        of_phases = PhaseResults([*counts, *cuts], carried, [])
        pushed = [
            *jax.tree.leaves(others),
            *of_phases.combined,
            *step.carried.pushed(self._plan, state, batches, others, of_phases),
        ]
        kinds = [self._plan.kinds[i] for i in self._main.outputs]
        early = [
            jnp.stack(values) if kind == LOCAL else _joined(kind, values)
            for kind, values in zip(kinds, outputs, strict=True)
        ]
        here = traced.piece([traced.outputs[i] for i in step.here])(state, others, [*counts, *cuts], carried)
        reported = [*early, *here, *(pushed[j] for j in step.update.read_by_scalars)]
        scales = step.spec.options.loss_scaling is not None  # then the worker looks for an overflow of its own
        finite = jnp.stack([all_finite(jnp.asarray(x)) for x in cuts]).all() if scales else jnp.bool_(True)
        return [*(pushed[i] for i in step.pushed), finite, *map(jnp.asarray, reported)]

    def _count_function(self, arguments: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        """Makes the function from a call's arguments to the counts of all closures together, which no server knows."""
        k = self._n * self._accumulate

        def counts(state: Sequence[Any], leaves: list[Any]) -> list[Any]:
            whole = self._step.filled(dict(enumerate(state)))
            combined: list[Any] = []
            for phase in self._before:
                operands, _, _ = self._run_phase(phase, whole, leaves, combined, list(map(jnp.int32, range(k))))
                combined += [
                    _together(op, values, shape, 1)
                    for (op, shape), values in zip(_arrays_of_cuts(phase), operands, strict=True)
                ]
            return combined

        state = [np.zeros(shape.shape, shape.dtype) for shape in self._step.update.shapes]
        closed = jax.make_jaxpr(counts)(state, list(arguments))
        of_state = graph.dependents(closed, graph.body_of(closed).invars[: len(state)])
        if any(graph.is_in(v, of_state) for v in graph.body_of(closed).outvars):
            raise BoundaryError(
                "a value that the step combines before its gradient, such as the weights of a masked `jdist.mean`, "
                "depends on the state, which only the workers have. In synchronous mode it is summed before any worker "
                "begins: compute it from the batch."
            )
        return lambda leaves: counts(state, leaves)

    def _run_phase(
        self, phase: Phase, state: PyTree, leaves: Sequence[Any], combined: list[Any], numbers: Sequence[Any]
    ) -> list[list[Any]]:
        """Runs a phase over parts of a batch: `(cut operands, carried leaves, outputs)` of all."""
        # `leaves` are the arguments of a call or closure, in parts of as many rows; `combined` the
        # combined arrays of earlier phases; `numbers` the number of each part's microbatch.
        rows, others = leaves[: self._num_rows], leaves[self._num_rows :]
        sizes = [x.shape[0] // len(numbers) for x in rows]
        _, others_tree = jax.tree.unflatten(self._treedef, leaves)
        prepared = phase.prepare(state, others_tree, combined)
        results = []
        for j, number in enumerate(numbers):
            part = [x[j * n : (j + 1) * n] for x, n in zip(rows, sizes, strict=True)]
            batches, _ = jax.tree.unflatten(self._treedef, [*part, *others])
            operands, carried, outputs = phase.run(prepared, batches, number)
            results.append(([x for xs in operands for x in xs], carried, outputs))
        return [list(zip(*values, strict=True)) for values in zip(*results, strict=True)]

    def _combined(self, reported: list[list[Any]]) -> tuple[list[Any], Any, list[Any]]:
        step, update, kinds = self._step, self._step.update, self._plan.kinds
        early, here = self._main.outputs, step.here
        of_closures = list(zip(*reported, strict=True))
        results: dict[int, Any] = {
            i: jnp.concatenate(values) if kinds[i] == LOCAL else _joined(kinds[i], values)
            for i, values in zip(early, of_closures, strict=False)
        }
        num_results = len(early) + len(here)
        needed = dict(zip(update.read_by_scalars, of_closures[num_results:], strict=True))
        pushed = [
            self._of_all(j, needed[j]) if j in needed else jnp.zeros(shape.shape, shape.dtype)
            for j, shape in enumerate(update.pushed_shapes)
        ]
        # What the worker computes after the phases is the same for all closures, a per-replica result too: each gets it.
        same = dict(zip(here, reported[0][len(early) : num_results], strict=True))
        same |= dict(zip(step.late, update.late(pushed, range(len(step.late))), strict=True))
        results |= {
            i: jnp.broadcast_to(x, (self._plan.k, *jnp.shape(x))) if kinds[i] == LOCAL else x for i, x in same.items()
        }
        num_outputs = step.outputs_treedef.num_leaves
        flags = [jnp.asarray(results[i]) for i in range(num_outputs, len(kinds))]
        finite = jnp.stack(flags).all() if flags else jnp.bool_(True)
        return update.worker_scalars(pushed), finite, [results[i] for i in range(num_outputs)]

    def _of_all(self, number: int, values: Sequence[Any]) -> Any:
        """Combines what all closures push under a number."""
        op, whole = self._cuts.get(number, (None, ()))
        if op in (None, "sum"):  # of a sum each has brought so many times its own
            return _mean(values)
        return _together(op, values, whole, 1)


def _check_keys(step: SplitStep) -> None:
    state = jax.tree.unflatten(step.treedef, range(len(step.impls)))
    keys = [
        jax.tree_util.keystr(path) or "it"
        for path, i in jax.tree_util.tree_leaves_with_path(state)
        if i in step.carried.leaves and step.impls[i] is not None
    ]
    if keys:
        raise BoundaryError(
            f"the step computes {', '.join(keys)}, a PRNG key, from the batch. In synchronous mode each worker has rows of "
            "its own, and servers average what workers push, which keys cannot be: fold in the step's number or what "
            "else is the same for all workers, or use asynchronous mode."
        )


def _check_phases(step: SplitStep) -> None:
    phases = step.plan.split.phases
    gradient = [n for n, p in enumerate(phases) if any(cut.collective.kind == "gradient" for cut in p.cuts)]
    if gradient and gradient[0] != len(phases) - 1:
        raise BoundaryError(
            "the step computes something of its rows from what its workers have combined already (a second "
            "gradient at other parameters, a loss after the update), which in synchronous mode no worker can wait "
            "for. Make two steps of it, use asynchronous mode, where a worker combines its own, or `jdist.mirrored()`."
        )


def _arrays_of_cuts(phase: Phase) -> list[tuple[str, tuple[int, ...]]]:
    """The operation and the whole shape of each array that a phase's cuts combine."""
    return [(cut.collective.op, shape.shape) for cut in phase.cuts for shape in cut.shapes]


def _mean(values: Sequence[Any]) -> Any:
    """Takes the mean as servers do."""
    if not jnp.issubdtype(values[0].dtype, jnp.inexact):
        return mean_of_integers(values)
    return sum(values[1:], values[0]) / len(values)


def _together(op: str, values: Sequence[Any], whole: tuple[int, ...], times: int) -> Any:
    """Combines what several computed for one cut; a sum so many times."""
    if op == "gather":
        return jnp.concatenate(values, axis_of_rows(values[0].shape, whole))
    if op in ("max", "min"):
        return functools.reduce(jnp.maximum if op == "max" else jnp.minimum, values)
    total = sum(values[1:], values[0])
    if op == "mean":
        return total / len(values) if len(values) > 1 else total  # an integer stays one: it travels as its bytes
    return total * times


def _joined(kind: OutputKind, values: Sequence[Any]) -> Any:
    """Combines a result of microbatches or closures: a mean, or rows in the order of the call's."""
    return _together("mean", values, (), 1) if kind == METRIC else jnp.concatenate(values)
