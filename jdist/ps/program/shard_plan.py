"""Describes a shard: the rows of the state that it keeps, and what each step pulls from it and pushes to it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jdist.errors import WireError
from jdist.ps.program.partition import Rows
from jdist.ps.protocol.shard import NonFinite, OnStale, Rules
from jdist.ps.protocol.wire import ROUNDED, Spec, wide

MOST_PROGRAM_BYTES = 1 << 32
MOST_RESULT_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShare:
    """The part of one step that workers exchange with a shard.

    Attributes:
        rows: which rows of which pushed arrays a worker brings.
        pushes: the specs of all that comes with a closure: `rows`, then in asynchronous mode the scalars.
        scalars: of what comes with the commit of several closures as one update, in synchronous mode.
        pulled: places in `ShardPlan.kept` of what a worker pulls when the version has changed.
        pulled_once: of what it pulls besides when it has nothing yet, as it never changes.
        unweighted: places in `rows` of what is no gradient, and counts in full however late it is.
    """

    WIRE_NAME: ClassVar[str] = "StepView"

    rows: tuple[Rows, ...]
    pushes: tuple[Spec, ...]
    scalars: tuple[Spec, ...]
    pulled: tuple[int, ...]
    pulled_once: tuple[int, ...]
    unweighted: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """The part of a state that one server keeps, and what it does with it. Servers and workers receive it as it is.

    Attributes:
        server: the server's number.
        rows: which rows of which leaves it keeps; those that change come first.
        kept: their specs.
        changing: how many of them change.
        views: the share of each step.
        max_staleness, on_stale, non_finite: as in `shard.Rules`.
        rounded: places in `kept` of what workers are sent rounded; programs return the copies of those that change.
        weighs: whether gradients are weighted, late ones or several for a mean; programs then take them `wire.wide`.
    """

    server: int
    rows: tuple[Rows, ...]
    kept: tuple[Spec, ...]
    changing: int
    views: tuple[StepShare, ...]
    max_staleness: int | None
    on_stale: OnStale
    non_finite: NonFinite
    rounded: tuple[int, ...] = ()
    weighs: bool = False

    @property
    def rules(self) -> Rules:
        """The rules of the shard's machine."""
        return Rules(max_staleness=self.max_staleness, on_stale=self.on_stale, non_finite=self.non_finite)

    def sent_specs(self) -> list[Spec]:
        """Returns the specs of `kept`, as it is sent to workers."""
        rounded = set(self.rounded)
        return [Spec(spec.shape, ROUNDED.name) if i in rounded else spec for i, spec in enumerate(self.kept)]

    def program_specs(self, view: int) -> list[Spec]:
        """Returns the specs of what a view's program takes: `kept`, what is pushed, and scalars."""
        step = self.views[view]
        return [*self.kept, *(map(wide, step.pushes) if self.weighs else step.pushes), *step.scalars]

    def widens(self, view: int) -> bool:
        """Returns whether some of what is pushed comes in fewer bits than the program takes it."""
        return self.weighs and any(wide(spec) != spec for spec in self.views[view].pushes)

    def sent(self, view: int, *, changed: bool, first: bool) -> list[int]:
        """Returns the places in `kept` of the arrays that answer a pull.

        Args:
            view: which step's.
            changed: whether the worker has an older version.
            first: whether it has none.

        Raises:
            WireError: there is no such view.
        """
        if not 0 <= view < len(self.views):
            raise WireError(f"there is no view {view}; there are {len(self.views)}")
        step = self.views[view]
        return [*(step.pulled if changed else ()), *(step.pulled_once if first else ())]


SHARD_PLAN: dict[str, type] = {"ShardPlan": ShardPlan}


def program_spec(size: object) -> Spec:
    """Returns the spec of a program's bytes.

    Args:
        size: how many a caller says they are.

    Raises:
        WireError: there cannot be so many.
    """
    return _bytes(size, MOST_PROGRAM_BYTES, "a program")


def result_spec(size: object) -> Spec:
    """Returns the spec of the bytes of a closure's result; see `program_spec`."""
    return _bytes(size, MOST_RESULT_BYTES, "a result")


def _bytes(size: object, most: int, what: str) -> Spec:
    if type(size) is not int or not 0 <= size < most:
        raise WireError(f"the size of {what} must be an int from 0 to {most - 1:,}")
    return Spec((size,), "uint8")
