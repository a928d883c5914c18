"""What a shard is told: which arrays it keeps, and what each step takes from it and brings to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jdist.errors import WireError
from jdist.ps.program.wire_dtype import ROUNDED
from jdist.ps.protocol.shard import NonFinite, OnStale, Rules
from jdist.ps.protocol.wire import Spec, wide

MOST_PROGRAM_BYTES = 1 << 32
MOST_RESULT_BYTES = 1 << 30
Described = tuple[tuple[int, ...], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepView:
    """What one step takes from a shard, and brings to it.

    Attributes:
        pushes: the arrays that come with a closure.
        scalars: those that come with the commit of several closures as one update.
        pulled: places in `ShardPlan.kept` of what a worker pulls when the version has changed.
        pulled_once: of what it pulls besides when it has nothing yet.
        unweighted: places in `pushes` of what is no gradient, and counts in full however late it is.
    """

    pushes: tuple[Described, ...]
    scalars: tuple[Described, ...]
    pulled: tuple[int, ...]
    pulled_once: tuple[int, ...]
    unweighted: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """What a shard keeps and does, as a restore brings it.

    Attributes:
        kept: its arrays; those that change come first.
        changing: how many of them change.
        views: for each step.
        max_staleness, on_stale, non_finite: as in `shard.Rules`.
        rounded: places in `kept` of what workers are sent rounded; programs return the copies of those that change.
        weighs: whether gradients are weighted, late ones or several for a mean; programs then take them `wire.wide`.
    """

    kept: tuple[Described, ...]
    changing: int
    views: tuple[StepView, ...]
    max_staleness: int | None
    on_stale: OnStale
    non_finite: NonFinite
    rounded: tuple[int, ...] = ()
    weighs: bool = False

    def sent_specs(self) -> list[Spec]:
        """Of `kept`, as it is sent to workers."""
        rounded = set(self.rounded)
        return [Spec(shape, ROUNDED.name if i in rounded else dtype) for i, (shape, dtype) in enumerate(self.kept)]

    def taken(self, view: int) -> list[Spec]:
        """Of what a view's program takes: `kept`, what is pushed, and scalars."""
        found = self.views[view]
        pushes = specs(found.pushes)
        return [*specs(self.kept), *(map(wide, pushes) if self.weighs else pushes), *specs(found.scalars)]

    def widens(self, view: int) -> bool:
        """Whether some of what is pushed comes in fewer bits than the program takes it."""
        return self.weighs and any(wide(spec) != spec for spec in specs(self.views[view].pushes))

    @property
    def rules(self) -> Rules:
        """What the machine is told."""
        return Rules(max_staleness=self.max_staleness, on_stale=self.on_stale, non_finite=self.non_finite)

    def sent(self, view: int, *, changed: bool, first: bool) -> list[int]:
        """Places in `kept` of the arrays that answer a pull.

        Raises:
            WireError: there is no such view.
        """
        if not 0 <= view < len(self.views):
            raise WireError(f"there is no view {view}")
        found = self.views[view]
        return [*(found.pulled if changed else ()), *(found.pulled_once if first else ())]


KEEPING: dict[str, type] = {"ShardPlan": ShardPlan, "StepView": StepView}


def specs(described: Sequence[Described]) -> list[Spec]:
    """Specs as a `ShardPlan` has them."""
    return [Spec(shape, dtype) for shape, dtype in described]


def program_spec(size: object) -> Spec:
    """The bytes of a program, as a caller says how many they are.

    Raises:
        WireError: there cannot be as many.
    """
    return _bytes(size, MOST_PROGRAM_BYTES, "a program")


def result_spec(size: object) -> Spec:
    """The same of a closure's result."""
    return _bytes(size, MOST_RESULT_BYTES, "a result")


def _bytes(size: object, most: int, what: str) -> Spec:
    if type(size) is not int or not 0 <= size < most:
        raise WireError(f"{what} of no size")
    return Spec((size,), "uint8")
