"""What servers and workers are told: what is kept where, and for each function where inputs come from and results go."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jdist.ps.program.layout import Layout, Rows, ShardLayout
from jdist.ps.program.shard_plan import Described, ShardPlan, StepView
from jdist.ps.protocol.shard import NonFinite, Rules
from jdist.ps.protocol.wire import Spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Some rows of a numbered array; see `layout.Rows`."""

    of: int
    start: int
    stop: int | None

    def cut(self, array: Any) -> Any:
        """These rows of the array."""
        return array if self.stop is None else array[self.start : self.stop]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardOfFunction:
    """A shard, as a function's worker needs it.

    Attributes:
        pulled: for each array that is pulled when the version has changed, which rows of which input it is.
        pulled_once: the same of what is pulled besides at first.
        pushes: which rows of which pushed array go there; the scalars come behind.
    """

    pulled: tuple[Place, ...]
    pulled_once: tuple[Place, ...]
    pushes: tuple[Place, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Function:
    """A function as a worker needs it: it takes inputs, then arguments.

    Of a step it returns pushed arrays, scalars, whether all gradients are finite, and outputs; else outputs alone.

    Attributes:
        inputs: the leaves of the state that it reads, whole, as they travel.
        arguments: batch and other arguments of a closure.
        outputs: what a closure returns.
        view: which step's view of the shards it has; None for a function that has no part in the state.
        updates: whether it pushes.
        stages_only: whether what it pushes is committed by the coordinator (synchronous mode).
        batch: which of its arguments are the leaves of a batch that the worker reads itself: the first one, and how many; they
            are not among `arguments`.
        takes_index: whether its first argument is the worker's number, which no closure brings.
        num_pushed: how many arrays it pushes.
        num_scalars: how many scalars.
        shards: where they go.
        non_finite: what happens to gradients that are not finite, as in `jdist.distribute`.
        loss_scale: which of its arguments is the loss scale, in whose place the worker puts its own once it has one, and the
            scale's growth interval; None: it scales no loss.
    """

    inputs: tuple[Described, ...] = ()
    arguments: tuple[Described, ...]
    outputs: tuple[Described, ...]
    view: int | None = None
    updates: bool = False
    stages_only: bool = False
    batch: tuple[int, int] | None = None
    takes_index: bool = False
    num_pushed: int = 0
    num_scalars: int = 0
    shards: tuple[ShardOfFunction, ...] = ()
    non_finite: NonFinite = "raise"
    loss_scale: tuple[int, int] | None = None


FUNCTION: dict[str, type] = {kind.__name__: kind for kind in (Function, ShardOfFunction, Place)}


def described(arrays: Sequence[Any]) -> tuple[Described, ...]:
    """Shapes and dtypes of arrays, or of structs that have them."""
    return tuple((tuple(x.shape), np.dtype(x.dtype).name) for x in arrays)


def keeping_of(layout: Layout, shard: ShardLayout, rules: Rules, *, is_sync: bool = False) -> ShardPlan:
    """What a server is told of its shard."""

    def view(step: int) -> StepView:
        pushes = _described(layout.push_specs(shard, step))
        arrays = len(pushes) - len(layout.steps[step].update.scalar_shapes)
        pushes, scalars = (pushes[:arrays], pushes[arrays:]) if is_sync else (pushes, ())
        found, gradients = shard.views[step], layout.steps[step].traced.gradients
        return StepView(
            pushes=pushes,
            scalars=scalars,
            pulled=found.pulled,
            pulled_once=found.pulled_once,
            unweighted=tuple(n for n, rows in enumerate(found.pushes) if rows.of not in gradients),
        )

    return ShardPlan(
        kept=_described(layout.kept_specs(shard)),
        changing=shard.changing,
        views=tuple(map(view, range(len(layout.steps)))),
        max_staleness=rules.max_staleness,
        on_stale=rules.on_stale,
        non_finite=rules.non_finite,
        rounded=shard.rounded,
        weighs=is_sync or rules.on_stale == "down_weight",
    )


def function_of(
    layout: Layout,
    step: int,
    arguments: Sequence[Any],
    outputs: Sequence[Any],
    non_finite: NonFinite,
    *,
    stages_only: bool = False,
) -> Function:
    """What a worker is told of a step.

    Args:
        layout: the state over its servers.
        step: which of its steps.
        arguments: arrays or structs of a closure's arguments.
        outputs: of what it returns.
        non_finite: what happens to gradients that are not finite.
        stages_only: whether the coordinator commits what it pushes.
    """
    parts = layout.steps[step]
    read, pushed = ({i: n for n, i in enumerate(numbers)} for numbers in (parts.read, parts.pushed))

    def places(rows: Sequence[Rows], numbers: dict[int, int]) -> tuple[Place, ...]:
        return tuple(Place(of=numbers[r.of], start=r.start, stop=r.stop) for r in rows)

    return Function(
        inputs=described(layout.inputs(step)),
        arguments=described(arguments),
        outputs=described(outputs),
        view=step,
        updates=bool(parts.update.reads),
        stages_only=stages_only,
        num_pushed=len(parts.pushed),
        num_scalars=0 if stages_only else len(parts.update.scalar_shapes),
        shards=tuple(
            ShardOfFunction(
                pulled=places([shard.kept[k] for k in shard.views[step].pulled], read),
                pulled_once=places([shard.kept[k] for k in shard.views[step].pulled_once], read),
                pushes=places(shard.views[step].pushes, pushed),
            )
            for shard in layout.shards
        ),
        non_finite=non_finite,
    )


def _described(specs: Sequence[Spec]) -> tuple[Described, ...]:
    return tuple((s.shape, s.dtype) for s in specs)
