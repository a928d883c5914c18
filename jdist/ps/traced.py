"""A step that was traced for a strategy's workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jdist.ps.program import StepParts
from jdist.ps.shard_state import NonFinite
from jdist.ps.sync_program import SyncParts


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
        loss_scale: see `job.Function`.
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
