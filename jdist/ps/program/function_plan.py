"""Plans a function that workers compute: what a worker reads for it, is given, returns and pushes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdist.ps.program.artifact import sent_of, with_shardings
from jdist.ps.program.layout import Layout
from jdist.ps.program.split_step import SplitStep
from jdist.ps.protocol.shard import NonFinite
from jdist.ps.protocol.wire import Spec, spec_of

# From what each closure of an update returned to `(scalars that servers need besides the mean of the gradients, whether that
# mean is finite, leaves of the step's other results than the state)`.
Combine = Callable[[Sequence[Sequence[Any]]], tuple[list[np.ndarray], bool, list[np.ndarray]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionPlan:
    """A function for workers; it takes inputs, then arguments, as the `ShardPlan`s map them."""

    # A step returns pushed arrays, scalars, whether all gradients are finite, and outputs; other
    # functions return outputs only.

    read: tuple[int, ...] = ()  # the numbers of the leaves of the state that it reads
    inputs: tuple[Spec, ...] = ()  # their full specs, as they travel
    arguments: tuple[Spec, ...]  # batch and other arguments of a closure
    outputs: tuple[Spec, ...]  # the values that a closure returns
    # the number of its step in `ShardPlan.views`; None for a function without a state
    view: int | None = None
    updates: bool = False  # whether it pushes
    stages_only: bool = False  # the coordinator commits its pushes (synchronous mode)
    # (first, count) of the arguments that the worker reads itself; `arguments` lacks them
    batch: tuple[int, int] | None = None
    takes_index: bool = False  # its first argument is the worker's number, which no closure brings
    pushed: tuple[int, ...] = ()  # the numbers of the arrays that it pushes
    num_scalars: int = 0  # how many scalars go with them
    non_finite: NonFinite = "raise"  # as in `jdist.distribute`
    # place of the loss scale, which a worker replaces by its own, and its growth interval
    loss_scale: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StepFunction:
    """The workers' computation of a split step."""

    step: SplitStep
    # from the step's inputs and a closure's arguments, flat, to the results in `FunctionPlan`
    run: Callable[[list[Any]], list[Any]]
    arguments: Sequence[Any]  # shapes of a closure's arguments
    outputs: Sequence[Any]  # shapes of its results
    # (first, count) of the arguments that the worker reads itself
    batch: tuple[int, int] | None = None
    # from a call's arguments to those of its closures (synchronous mode)
    cut: Callable[[Sequence[Any]], list[list[Any]]] | None = None
    combine: Combine | None = None  # combines the results of a call's closures (synchronous mode)


def make_function(step: SplitStep, batch: tuple[int, int] | None = None) -> StepFunction:
    """Makes the function of a step with one closure for each call."""
    # `batch`: (first, count) of the arguments that the worker reads itself.
    arguments = with_shardings(step.spec.strategy.mesh, jax.tree.leaves(step.arguments), step.num_batch_leaves)
    returned = jax.eval_shape(step.worker, [*(step.update.shapes[i] for i in step.read), *arguments])
    outputs = returned[len(returned) - step.outputs_treedef.num_leaves - step.reports_finite :]
    return StepFunction(step=step, run=step.worker, arguments=arguments, outputs=outputs, batch=batch)


def plan_function(layout: Layout, view: int, function: StepFunction) -> FunctionPlan:
    """Plans the function of the layout's step `view`."""
    step, stages_only = function.step, function.combine is not None
    return FunctionPlan(
        read=step.read,
        inputs=tuple(map(spec_of, layout.inputs(view))),
        arguments=tuple(map(spec_of, sent_of(function.arguments, function.batch))),
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
