"""Describes a shard: the rows of the state that it keeps, and what each step pulls from it and pushes to it."""

from __future__ import annotations

import dataclasses
import functools

from jdist.errors import WireError
from jdist.ps.program.partition import Rows
from jdist.ps.protocol.shard import Rules
from jdist.ps.protocol.wire import ROUNDED, Spec, wide

MOST_PROGRAM_BYTES = 1 << 32
MOST_RESULT_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShare:
    """The part of one step that workers exchange with a shard."""

    rows: tuple[Rows, ...]  # the rows of pushed arrays that a worker brings
    # the specs of all arrays of a closure: `rows`, in asynchronous mode followed by the scalars
    pushes: tuple[Spec, ...]
    scalars: tuple[Spec, ...]  # of the commit of several closures as one update (synchronous mode)
    # places in `ShardPlan.kept` that a worker pulls when the version has changed
    pulled: tuple[int, ...]
    # places of constant arrays, pulled by a worker that has nothing yet
    pulled_once: tuple[int, ...]
    # places in `rows` other than gradients: they count in full, however late
    unweighted: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """One server's part of a state, and its work; servers and workers receive it unchanged."""

    server: int
    rows: tuple[Rows, ...]  # rows of leaves that it keeps; those that change come first
    kept: tuple[Spec, ...]  # their specs
    changing: int  # how many of them change
    views: tuple[StepShare, ...]  # the share of each step
    rules: Rules  # of the shard's machine
    # places in `kept` that workers get rounded; programs return copies of those that change
    rounded: tuple[int, ...] = ()
    # gradients are weighted (late ones, or several for a mean); programs take them `wire.wide`
    weighs: bool = False

    def sent_specs(self) -> list[Spec]:
        """Returns the specs of `kept` as sent to workers."""
        rounded = set(self.rounded)
        return [Spec(spec.shape, ROUNDED.name) if i in rounded else spec for i, spec in enumerate(self.kept)]

    def program_specs(self, view: int) -> list[Spec]:
        """Returns the specs of a view's program's operands: `kept`, pushed arrays, and scalars."""
        step = self.views[view]
        return [*self.kept, *(map(wide, step.pushes) if self.weighs else step.pushes), *step.scalars]

    def widens(self, view: int) -> bool:
        """Returns whether some pushed arrays come in fewer bits than the program takes."""
        return self.weighs and any(wide(spec) != spec for spec in self.views[view].pushes)

    def sent(self, view: int, *, changed: bool, first: bool) -> list[int]:
        """Returns the places in `kept` of the arrays that answer a pull."""
        # `changed`: the worker has an older version; `first`: it has none.
        if not 0 <= view < len(self.views):
            raise WireError(f"view {view} does not exist; there are {len(self.views)}")
        step = self.views[view]
        return [*(step.pulled if changed else ()), *(step.pulled_once if first else ())]


def program_spec(size: object) -> Spec:
    """Returns the spec of a program's bytes; refuses impossible sizes."""
    return _bytes(size, MOST_PROGRAM_BYTES, "a program")


@functools.lru_cache(typed=True)  # a spec counts its bytes once
def result_spec(size: object) -> Spec:
    """Returns the spec of the bytes of a closure's result; see `program_spec`."""
    return _bytes(size, MOST_RESULT_BYTES, "a result")


def _bytes(size: object, most: int, what: str) -> Spec:
    if type(size) is not int or not 0 <= size < most:
        raise WireError(f"the size of {what} must be an int from 0 to {most - 1:,}")
    return Spec((size,), "uint8")
