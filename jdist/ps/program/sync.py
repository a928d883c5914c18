"""A step of synchronous mode: a call is cut into closures, whose gradients the servers average into one update.

The closures are to the call what microbatches are to gradient accumulation, only on several workers: each has its rows,
the counts that masked means divide by are summed over all of them beforehand, and what depends on the mean of the
gradients (a norm to clip by, a metric of the gradients) or on a total is computed by the coordinator from what the
closures report.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jdist.errors import BoundaryError
from jdist.jaxpr import graph
from jdist.ps.program.split_step import StepParts
from jdist.ps.protocol.shard import NonFinite
from jdist.ps.protocol.wire import mean_of_integers
from jdist.replica.gradients import all_finite
from jdist.step.microbatches import Gradients, axis_of_rows
from jdist.step.outputs import LOCAL, METRIC, OutputKind

PyTree = Any


@dataclass(frozen=True)
class Combined:
    """What several closures of one step give together.

    Attributes:
        scalars: what the servers need besides the mean of the gradients.
        finite: whether the mean of the gradients is finite.
        outputs: the leaves of what the step returns beside the state.
    """

    scalars: list[np.ndarray]
    finite: bool
    outputs: list[np.ndarray]


class SyncParts:
    """A step as the closures of one call.

    Args:
        parts: the step, taken apart for so many closures.
        closures: how many.
        treedef: of `(batches, others)` of a call.
        arguments: shapes of their leaves.
        num_batch_leaves: how many of these are rows of the batch.
    """

    def __init__(self, parts: StepParts, closures: int, treedef: Any, arguments: Sequence[Any], num_batch_leaves: int):
        self.parts, self._n, self._treedef, self._num_rows = parts, closures, treedef, num_batch_leaves
        self._accumulate = parts.spec.options.accumulate
        self._plan, self._found = parts.traced.plan, parts.traced
        self._check_keys()
        self._check_phases()
        *self._before, self._main = self._plan.parts.phases
        ops = [cut.collective.op for cut in self._main.cuts for _ in cut.shapes]
        num_others = len(arguments) - num_batch_leaves
        first = num_others + sum(len(cut.shapes) for phase in self._before for cut in phase.cuts)
        self._ops = dict(enumerate(ops, start=first))  # of what is pushed, by number
        self._wholes = dict(enumerate((shape.shape for cut in self._main.cuts for shape in cut.shapes), start=first))
        self._check_pushed()
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments]
        self._counts = jax.jit(self._count_function(structs))
        counts = jax.eval_shape(self._counts, structs)
        share = [
            jax.ShapeDtypeStruct((x.shape[0] // closures, *x.shape[1:]), x.dtype) for x in structs[:num_batch_leaves]
        ]
        number = jax.ShapeDtypeStruct((), np.int32)
        self.arguments = [*share, *structs[num_batch_leaves:], number, *counts]
        inputs = [parts.update.shapes[i] for i in parts.read]
        made = jax.eval_shape(self.worker, [*inputs, *self.arguments])
        self.reported = made[len(parts.pushed) + 1 :]
        self._combine = jax.jit(self._combined)

    def shares(self, leaves: Sequence[Any]) -> list[list[Any]]:
        """The arguments of each closure of a call, from the leaves of the call's."""
        counts = self._counts([np.asarray(x) for x in leaves])
        rows, others = [np.asarray(x) for x in leaves[: self._num_rows]], list(leaves[self._num_rows :])
        return [
            [*(x[i * len(x) // self._n : (i + 1) * len(x) // self._n] for x in rows), *others, np.int32(i), *counts]
            for i in range(self._n)
        ]

    def worker(self, values: list[Any]) -> list[Any]:
        """What a worker computes: of inputs and a closure's arguments the pushed arrays, a flag, and what it reports.

        The flag says whether the gradients are finite, where a worker needs to know it for its loss scale; else True.
        """
        n = len(self.parts.read)
        spec = self.parts.spec
        whole, rows = PartitionSpec(), PartitionSpec(spec.strategy.axes)
        in_specs = [*[whole] * n, *[rows] * self._num_rows, *[whole] * (len(values) - n - self._num_rows)]
        return jax.shard_map(
            self._on_replica, mesh=spec.strategy.mesh, in_specs=(in_specs,), out_specs=whole, check_vma=False
        )(values)

    def combine(self, reported: Sequence[Sequence[Any]]) -> Combined:
        """What the closures of one update give together.

        Args:
            reported: what each of them reported.
        """
        scalars, finite, outputs = jax.device_get(self._combine([list(each) for each in reported]))
        return Combined(scalars, bool(finite), outputs)

    def _check_keys(self) -> None:
        impls = self._found.impls
        state = jax.tree.unflatten(self._found.treedef, range(len(impls)))
        keys = [
            jax.tree_util.keystr(path) or "it"
            for path, i in jax.tree_util.tree_leaves_with_path(state)
            if i in self._found.carrying.leaves and impls[i] is not None
        ]
        if keys:
            raise BoundaryError(
                f"the step computes {', '.join(keys)}, a PRNG key, from the batch. In synchronous mode each worker has rows of "
                "its own, and servers average what workers push, which keys cannot be: fold in the step's number or what "
                "else is the same for all workers, or use asynchronous mode."
            )

    def _check_phases(self) -> None:
        phases = self._plan.parts.phases
        gradient = [n for n, p in enumerate(phases) if any(cut.collective.kind == "gradient" for cut in p.cuts)]
        if gradient and gradient[0] != len(phases) - 1:
            raise BoundaryError(
                "the step computes something of its rows from what its workers have combined already (a second "
                "gradient at other parameters, a loss after the update), which in synchronous mode no worker can wait "
                "for. Make two steps of it, use asynchronous mode, where a worker combines its own, or `jdist.mirrored()`."
            )

    def _check_pushed(self) -> None:
        wrong = {self._ops[j] for j in self.parts.pushed if self._ops.get(j) in ("max", "min", "gather")}
        if wrong:
            raise BoundaryError(
                f"the state depends on what the step combines by {' and '.join(sorted(wrong))} over all rows. In "
                "synchronous mode servers average what workers push: put a sum or a mean into the state, or use "
                "`jdist.mirrored()`."
            )

    def _on_replica(self, values: list[Any]) -> list[Any]:
        n, parts, a = len(self.parts.read), self._plan.parts, self._accumulate
        num_arguments = self._treedef.num_leaves
        leaves, (number, *counts) = values[n : n + num_arguments], values[n + num_arguments :]
        state = self._found.filled(dict(zip(self.parts.read, values[:n], strict=True)))
        old = jax.tree.leaves(state)
        batches, others = jax.tree.unflatten(self._treedef, leaves)
        prepared = self._main.prepare(state, others, counts)
        found = []
        for j in range(a):
            rows, _ = jax.tree.unflatten(self._treedef, self._rows_of(leaves, j, a))
            operands, carried, outputs = self._main.run(prepared, rows, number * a + j)
            found.append(([x for xs in operands for x in xs], carried, outputs))
        # Servers take the mean; what is to be a sum is brought as so many times itself.
        cuts = [
            _together(op, values, whole, self._n)
            for op, whole, values in zip(
                self._ops.values(),
                self._wholes.values(),
                zip(*(cuts for cuts, _, _ in found), strict=True),
                strict=True,
            )
        ]
        begun = [old[parts.carried[i].leaf] if parts.carried[i].adds_up else None for i in self._main.carried]
        carried = [
            _together("mean", values, (), 1) if start is None else start + self._n * sum(x - start for x in values)
            for start, values in zip(begun, zip(*(carried for _, carried, _ in found), strict=True), strict=True)
        ]
        made = Gradients([*counts, *cuts], carried, [])
        pushed = [
            *leaves[self._num_rows :],
            *made.combined,
            *self._found.carrying.pushed(self._plan, state, batches, others, made),
        ]
        kinds = [self._plan.kinds[i] for i in self._main.outputs]
        early = [
            jnp.stack(values) if kind == LOCAL else _joined(kind, values)
            for kind, values in zip(kinds, zip(*(outputs for _, _, outputs in found), strict=True), strict=True)
        ]
        traced = parts.traced
        here = traced.piece([traced.outputs[i] for i in self._found.here])(state, others, made.combined, made.carried)
        reported = [*early, *here, *(pushed[j] for j in self.parts.update.read_by_scalars)]
        scales = self.parts.spec.options.loss_scaling is not None  # then the worker looks for an overflow of its own
        finite = jnp.stack([all_finite(jnp.asarray(x)) for x in cuts]).all() if scales else jnp.bool_(True)
        return [*(pushed[i] for i in self.parts.pushed), finite, *map(jnp.asarray, reported)]

    def _count_function(self, arguments: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        """From a call's arguments the counts of all closures together, of which no server knows."""
        shapes = self._found.shapes
        k = self._n * self._accumulate

        def counts(state: list[Any], leaves: list[Any]) -> list[Any]:
            whole = self._found.filled(dict(enumerate(state)))
            _, others = jax.tree.unflatten(self._treedef, leaves)
            combined: list[Any] = []
            for phase in self._before:
                prepared = phase.prepare(whole, others, combined)
                found = []
                for i in range(k):
                    rows, _ = jax.tree.unflatten(self._treedef, self._rows_of(leaves, i, k))
                    operands, _, _ = phase.run(prepared, rows, jnp.int32(i))
                    found.append([x for xs in operands for x in xs])
                described = [(cut.collective.op, shape.shape) for cut in phase.cuts for shape in cut.shapes]
                combined += [
                    _together(op, values, whole_shape, 1)
                    for (op, whole_shape), values in zip(described, zip(*found, strict=True), strict=True)
                ]
            return combined

        state = [self._found.nothing(i) for i in range(len(shapes))]
        closed = jax.make_jaxpr(counts)(state, list(arguments))
        of_state = graph.dependents(closed, graph.body_of(closed).invars[: len(state)])
        if any(graph.is_in(v, of_state) for v in graph.body_of(closed).outvars):
            raise BoundaryError(
                "what the step combines before its gradient, as the weights of a masked `jdist.mean`, depends on the "
                "state, which only the workers have. In synchronous mode it is summed before any worker begins: compute "
                "it from the batch."
            )
        return lambda leaves: counts(state, leaves)

    def _combined(self, reported: list[list[Any]]) -> tuple[list[Any], Any, list[Any]]:
        found, update, kinds = self._found, self.parts.update, self._plan.kinds
        early, here = list(self._main.outputs), list(found.here)
        results: dict[int, Any] = {
            i: jnp.concatenate(values) if kinds[i] == LOCAL else _joined(kinds[i], values)
            for i, values in zip(early, zip(*(each[: len(early)] for each in reported), strict=True), strict=True)
        }
        # What the worker computes behind the phases is the same for all; a per-replica result of it that of each.
        behind = reported[0][len(early) : len(early) + len(here)]
        k = self._plan.k
        results |= {
            i: jnp.broadcast_to(x, (k, *jnp.shape(x))) if kinds[i] == LOCAL else x
            for i, x in zip(here, behind, strict=True)
        }
        needed = dict(zip(update.read_by_scalars, range(len(early) + len(here), len(reported[0])), strict=True))
        pushed = [
            self._of_all(j, [each[needed[j]] for each in reported])
            if j in needed
            else jnp.zeros(shape.shape, shape.dtype)
            for j, shape in enumerate(update.pushed_shapes)
        ]
        late = update.late(pushed, range(len(found.late)))
        results |= {
            i: jnp.broadcast_to(x, (k, *jnp.shape(x))) if kinds[i] == LOCAL else x
            for i, x in zip(found.late, late, strict=True)
        }
        flags = [jnp.asarray(results[i]) for i in range(found.num_outputs, len(kinds))]
        finite = jnp.stack(flags).all() if flags else jnp.bool_(True)
        return update.worker_scalars(pushed), finite, [results[i] for i in range(found.num_outputs)]

    def _of_all(self, number: int, values: list[Any]) -> Any:
        """What is pushed under a number, of all closures."""
        op = self._ops.get(number)
        if op in (None, "sum"):  # of a sum each has brought so many times its own
            return _mean(values)
        return _together(op, values, self._wholes[number], 1)

    def _rows_of(self, leaves: Sequence[Any], part: int, parts: int) -> list[Any]:
        """The leaves of a call, or closure, with one part of the batch's rows."""
        rows = [x.shape[0] // parts for x in leaves[: self._num_rows]]
        return [x[part * n : (part + 1) * n] for x, n in zip(leaves, rows, strict=False)] + list(
            leaves[self._num_rows :]
        )


def _mean(values: list[Any]) -> Any:
    """As the servers take it."""
    if not jnp.issubdtype(values[0].dtype, jnp.inexact):
        return mean_of_integers(values)
    return sum(values[1:], values[0]) / len(values)


def _together(op: str, values: Sequence[Any], whole: tuple[int, ...], times: int) -> Any:
    """What several computed for one cut; a sum so many times."""
    if op == "gather":
        return jnp.concatenate(values, axis_of_rows(values[0].shape, whole))
    if op in ("max", "min"):
        return functools.reduce(jnp.maximum if op == "max" else jnp.minimum, values)
    total = sum(values[1:], values[0])
    return total / len(values) if op == "mean" else total * times


def _joined(kind: OutputKind, values: Sequence[Any]) -> Any:
    """A result of microbatches or closures: a mean, or rows in the order of the call's."""
    return sum(values[1:], values[0]) / len(values) if kind == METRIC else jnp.concatenate(values)


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A step for batches of one size, ready to be shipped.

    Attributes:
        parts: the step, taken apart.
        function: what a worker computes, of a flat list of arrays.
        arguments: shapes of a closure's arguments.
        outputs: shapes of what it returns.
        non_finite: what happens to gradients that are not finite.
        sync: how the closures of a call become one update, in synchronous mode.
        batch: which of the arguments the worker reads itself: the first one, and how many.
        loss_scale: see `function_plan.FunctionPlan`.
        tells_finite: whether a call's results end with whether its gradients were finite.
    """

    parts: StepParts
    function: Callable[[list[Any]], list[Any]]
    arguments: Sequence[Any]
    outputs: Sequence[Any]
    non_finite: NonFinite
    sync: SyncParts | None = None
    batch: tuple[int, int] | None = None
    loss_scale: tuple[int, int] | None = None
    tells_finite: bool = False

    @property
    def sent(self) -> list[Any]:
        """Shapes of the arguments that go with a closure."""
        start, count = self.batch or (0, 0)
        return [*self.arguments[:start], *self.arguments[start + count :]]
