"""Plans a function that workers compute: what a worker reads for it, is given, returns and pushes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdist.ps.program.artifact import with_shardings
from jdist.ps.program.layout import Layout
from jdist.ps.program.split_step import SplitStep
from jdist.ps.protocol.shard import NonFinite
from jdist.ps.protocol.wire import Spec, spec_of

# From what each closure of an update returned to `(scalars that servers need besides the mean of the gradients, whether that
# mean is finite, leaves of what the step returns beside the state)`.
Combine = Callable[[Sequence[Sequence[Any]]], tuple[list[np.ndarray], bool, list[np.ndarray]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionPlan:
    """A function as it is described to workers. It takes inputs, then arguments; the `ShardPlan`s say what goes where.

    Of a step it returns pushed arrays, scalars, whether all gradients are finite, and outputs; else outputs alone.

    Attributes:
        read: the numbers of the leaves of the state that it reads.
        inputs: their specs, whole, as they travel.
        arguments: batch and other arguments of a closure.
        outputs: what a closure returns.
        view: the number of its step in `ShardPlan.views`; None for a function that has no part in the state.
        updates: whether it pushes.
        stages_only: whether what it pushes is committed by the coordinator (synchronous mode).
        batch: which of its arguments are the leaves of a batch that the worker reads itself: the first one, and how many; they
            are not among `arguments`.
        takes_index: whether its first argument is the worker's number, which no closure brings.
        pushed: the numbers of the arrays that it pushes.
        num_scalars: how many scalars go with them.
        non_finite: what happens to gradients that are not finite, as in `jdist.distribute`.
        loss_scale: which of its arguments is the loss scale, in whose place the worker puts its own once it has one, and the
            scale's growth interval; None: it scales no loss.
    """

    read: tuple[int, ...] = ()
    inputs: tuple[Spec, ...] = ()
    arguments: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    view: int | None = None
    updates: bool = False
    stages_only: bool = False
    batch: tuple[int, int] | None = None
    takes_index: bool = False
    pushed: tuple[int, ...] = ()
    num_scalars: int = 0
    non_finite: NonFinite = "raise"
    loss_scale: tuple[int, int] | None = None


FUNCTION_PLAN: dict[str, type] = {"FunctionPlan": FunctionPlan}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StepFunction:
    """What workers compute of a split step.

    Attributes:
        step: the step.
        run: from flat lists of what the step reads and of a closure's arguments to what the `FunctionPlan` says.
        arguments: shapes of a closure's arguments.
        outputs: shapes of what it returns.
        batch: which of the arguments the worker reads itself: the first one, and how many.
        cut: in synchronous mode, from the arguments of a call to those of each of its closures.
        combine: in synchronous mode, combines what the closures of a call returned.
    """

    step: SplitStep
    run: Callable[[list[Any]], list[Any]]
    arguments: Sequence[Any]
    outputs: Sequence[Any]
    batch: tuple[int, int] | None = None
    cut: Callable[[Sequence[Any]], list[list[Any]]] | None = None
    combine: Combine | None = None


def make_function(step: SplitStep, batch: tuple[int, int] | None = None) -> StepFunction:
    """Makes the function of a step whose calls are a closure each.

    Args:
        step: the step.
        batch: which of the arguments the worker reads itself: the first one, and how many.
    """
    leaves, treedef = jax.tree.flatten(step.arguments)

    def run(values: Sequence[Any]) -> list[Any]:
        n = len(step.read)
        pushed, scalars, finite, outputs = step.worker(values[:n], *jax.tree.unflatten(treedef, values[n:]))
        reported = [finite] if step.reports_finite else []
        return [*pushed, *scalars, finite, *outputs, *reported] if step.updates else list(outputs)

    arguments = with_shardings(step.spec.strategy.mesh, leaves, step.num_batch_leaves)
    returned = jax.eval_shape(run, [*(step.update.shapes[i] for i in step.read), *arguments])
    outputs = returned[len(returned) - step.outputs_treedef.num_leaves - step.reports_finite :]
    return StepFunction(step=step, run=run, arguments=arguments, outputs=outputs, batch=batch)


def plan_function(layout: Layout, view: int, function: StepFunction) -> FunctionPlan:
    """Plans a step's function.

    Args:
        layout: the state over its servers.
        view: the step's number there.
        function: what workers compute of it.
    """
    step, stages_only = function.step, function.combine is not None
    start, count = function.batch or (0, 0)
    sent = [*function.arguments[:start], *function.arguments[start + count :]]
    return FunctionPlan(
        read=step.read,
        inputs=tuple(map(spec_of, layout.inputs(view))),
        arguments=tuple(map(spec_of, sent)),
        outputs=tuple(map(spec_of, function.outputs)),
        view=view,
        updates=step.updates,
        stages_only=stages_only,
        batch=function.batch,
        pushed=step.pushed,
        num_scalars=0 if stages_only else len(step.update.scalar_shapes),
        non_finite=step.spec.policy,
        loss_scale=step.loss_scale,
    )
