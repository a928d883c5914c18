"""The plan of a function: what a worker reads for it, is given, returns and pushes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jdist.ps.program.layout import Layout
from jdist.ps.protocol.shard import NonFinite
from jdist.ps.protocol.wire import Spec, spec_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionPlan:
    """A function as a worker needs it: it takes inputs, then arguments. What goes where, the `ShardPlan`s say.

    Of a step it returns pushed arrays, scalars, whether all gradients are finite, and outputs; else outputs alone.

    Attributes:
        read: the numbers of the leaves of the state that it reads.
        inputs: their specs, whole, as they travel.
        arguments: batch and other arguments of a closure.
        outputs: what a closure returns.
        view: which step's view of the shards it has; None for a function that has no part in the state.
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


def plan_function(
    layout: Layout,
    step: int,
    arguments: Sequence[Any],
    outputs: Sequence[Any],
    non_finite: NonFinite,
    *,
    stages_only: bool = False,
) -> FunctionPlan:
    """Plans a step's function.

    Args:
        layout: the state over its servers.
        step: which of its steps.
        arguments: arrays or structs of a closure's arguments.
        outputs: of what it returns.
        non_finite: what happens to gradients that are not finite.
        stages_only: whether the coordinator commits what it pushes.
    """
    parts = layout.steps[step]
    return FunctionPlan(
        read=parts.read,
        inputs=tuple(map(spec_of, layout.inputs(step))),
        arguments=tuple(map(spec_of, arguments)),
        outputs=tuple(map(spec_of, outputs)),
        view=step,
        updates=bool(parts.update.reads),
        stages_only=stages_only,
        pushed=parts.pushed,
        num_scalars=0 if stages_only else len(parts.update.scalar_shapes),
        non_finite=non_finite,
    )
