"""A step of synchronous mode: a call is cut into closures, whose gradients the servers average into one update.

The closures are to the call what microbatches are to gradient accumulation, only on several workers: each has every k-th
row, the counts that masked means divide by are summed over all of them beforehand, and what depends on the mean of the
gradients (a norm to clip by, a metric of the gradients) is computed by the coordinator from what the closures report.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jdist import dataflow
from jdist.errors import BoundaryError
from jdist.gradients import all_finite
from jdist.ps.program import StepParts
from jdist.transforms.results import LOCAL, METRIC, ROWS

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
        return [[*(x[i :: self._n] for x in rows), *others, np.int32(i), *counts] for i in range(self._n)]

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

    def _on_replica(self, values: list[Any]) -> list[Any]:
        n, parts, a = len(self.parts.read), self._plan.parts, self._accumulate
        num_arguments = self._treedef.num_leaves
        leaves, (number, *counts) = values[n : n + num_arguments], values[n + num_arguments :]
        state = self._found.filled(dict(zip(self.parts.read, values[:n], strict=True)))
        old = jax.tree.leaves(state[0])
        found, carried = list[Any](), list[Any]()
        for j in range(a):
            batches, others = jax.tree.unflatten(self._treedef, self._rows_of(leaves, j, a))
            cuts, carried, _, outputs = parts.gradients(state, batches, others, number * a + j, counts)
            found.append((cuts, [x for x in outputs if x is not None]))
            state = self._with_carried(state, carried)
        # Servers take the mean; what is to be a sum is brought as so many times itself.
        cuts = [
            sum(each) * self._n if op == "sum" else sum(each) / a
            for op, each in zip(parts.cuts, zip(*(cuts for cuts, _ in found), strict=True), strict=True)
        ]
        pushed = [*leaves[self._num_rows :], *cuts, *self._found.carrying.pushed(old, carried)]
        early = self._joined([outputs for _, outputs in found], inside=True)
        reported = [*early, *(pushed[j] for j in self.parts.update.read_by_scalars)]
        scales = self.parts.spec.options.loss_scaling is not None  # then the worker looks for an overflow of its own
        finite = jnp.stack([all_finite(jnp.asarray(x)) for x in cuts]).all() if scales else jnp.bool_(True)
        return [*(pushed[i] for i in self.parts.pushed), finite, *map(jnp.asarray, reported)]

    def _count_function(self, arguments: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        """From a call's arguments the counts of all closures together, of which no server knows."""
        parts, shapes = self._plan.parts, self._found.shapes

        def one(state: list[Any], leaves: list[Any], i: Any) -> list[Any]:
            batches, others = jax.tree.unflatten(self._treedef, leaves)
            return parts.counts(self._found.filled(dict(enumerate(state))), batches, others, i)

        state = [self._found.nothing(i) for i in range(len(shapes))]
        k = self._n * self._accumulate
        given = jax.eval_shape(lambda leaves: self._rows_of(leaves, 0, k), list(arguments))
        closed = jax.make_jaxpr(one)(state, given, jnp.int32(0))
        of_state = dataflow.dependents(closed, dataflow.body_of(closed).invars[: len(state)])
        if any(not dataflow.is_literal(v) and v in of_state for v in dataflow.body_of(closed).outvars):
            raise BoundaryError(
                "the weights of a masked `jdist.mean` depend on the parameters, which only the workers have. In synchronous "
                "mode they are summed before any worker begins: compute them from the batch."
            )

        def counts(leaves: list[Any]) -> list[Any]:
            each = [one(state, self._rows_of(leaves, i, k), jnp.int32(i)) for i in range(k)]
            return [functools.reduce(jnp.add, same) for same in zip(*each, strict=True)]

        return counts

    def _combined(self, reported: list[list[Any]]) -> tuple[list[Any], Any, list[Any]]:
        found, update, kinds = self._found, self.parts.update, self._plan.kinds
        early = [i for i in range(len(kinds)) if i not in found.late]
        joined = self._joined([each[: len(early)] for each in reported], inside=False)
        results: dict[int, Any] = dict(zip(early, joined, strict=True))
        needed = dict(zip(update.read_by_scalars, range(len(early), len(reported[0])), strict=True))
        pushed = [
            _mean([each[needed[j]] for each in reported]) if j in needed else jnp.zeros(shape.shape, shape.dtype)
            for j, shape in enumerate(update.pushed_shapes)
        ]
        late = update.late(pushed, range(len(found.late)))
        results |= dict(zip(found.late, late, strict=True))
        flags = [jnp.asarray(results[i]) for i in range(found.num_outputs, len(kinds))]
        finite = jnp.stack(flags).all() if flags else jnp.bool_(True)
        return update.worker_scalars(pushed), finite, [results[i] for i in range(found.num_outputs)]

    def _rows_of(self, leaves: Sequence[Any], part: int, parts: int) -> list[Any]:
        """The leaves of a call with some of the batch's rows."""
        return [x[part::parts] if n < self._num_rows else x for n, x in enumerate(leaves)]

    def _with_carried(self, state: PyTree, carried: Sequence[Any]) -> PyTree:
        leaves, treedef = jax.tree.flatten(state)
        for i, x in zip(self._plan.parts.carried, carried, strict=True):
            leaves[i] = x
        return jax.tree.unflatten(treedef, leaves)

    def _joined(self, outputs: Sequence[Sequence[Any]], *, inside: bool) -> list[Any]:
        """The results that wait for nothing, of the parts of a closure or of the closures of a call."""
        kinds = [kind for i, kind in enumerate(self._plan.kinds) if i not in self._found.late]
        return [
            _joined(METRIC if inside and kind == LOCAL else kind, values)
            for kind, values in zip(kinds, zip(*outputs, strict=True), strict=True)
        ]


def _mean(values: list[Any]) -> Any:
    """Of what is no floating-point number (a flag, a count of the caller's) the first: it is the same for all."""
    return sum(values[1:], values[0]) / len(values) if jnp.issubdtype(values[0].dtype, jnp.inexact) else values[0]


def _joined(kind: str, values: Sequence[Any]) -> Any:
    """A result of the closures: a mean, a total, one each, or rows in the order of the call's."""
    if kind == METRIC:
        return sum(values[1:], values[0]) / len(values)
    if kind == LOCAL:
        return jnp.stack(values)
    if kind == ROWS:
        return jnp.stack(values, 1).reshape(-1, *values[0].shape[1:])
    return sum(values[1:], values[0])
