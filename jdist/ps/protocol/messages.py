"""The messages to a shard, its answers, and its commands to the shell round it.

docs/parameter_server_protocol.md explains them. Their class names travel, and fields that differ from their defaults.
Arrays are not here: a `Ref` names some that the shell keeps.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Ref = Any  # the shell's name for received arrays; the machine only hands it back
Reason = Literal["generation", "fenced", "stale", "staged", "unknown", "non_finite", "empty"]


def changed(value: T, **fields: Any) -> T:
    """Returns a copy of a frozen dataclass with other fields, in a fifth of the time of `dataclasses.replace`."""
    copy: Any = object.__new__(type(value))
    copy.__dict__.update(value.__dict__, **fields)
    return copy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """The fields of every message.

    Attributes:
        call: the shell's name for the call, for the reply.
        generation: the history of the shards that the sender belongs to.
        settled: closures below this number are done; they may be forgotten.
        worker: the sender's number, under its epoch; None for the coordinator.
    """

    call: Any = None
    generation: int
    settled: int = 0
    worker: int | None = None
    epoch: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pull(Message):
    """Asks for the parameters.

    Attributes:
        known: the version that the sender has, or None.
        view: the step that it wants the arrays of.
    """

    known: int | None = None
    view: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Push(Message):
    """Brings this shard's part of a closure's gradients.

    Attributes:
        stage: whether the gradients are kept until a commit or a drop; else they are applied at once.
        attempt: how often this worker has computed the closure before; a later attempt replaces an earlier one.
        base: the version of this shard that the gradients were computed at.
        view: the step that the gradients belong to.
        finite: whether the gradients of all shards are finite.
        result: what the closure returned, on its home shard; None elsewhere.
    """

    closure: int
    stage: bool = False
    attempt: int = 0
    base: int
    view: int = 0
    gradients: Ref | None = None
    finite: bool = True
    result: Ref | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Commit(Message):
    """Applies what is staged.

    Attributes:
        closures: an update each, in this order.
        as_one: one update for all of them, by the mean of their gradients (synchronous mode).
        view: the step that they are of, where the commit brings scalars.
        scalars: what the update needs besides the mean.
    """

    closures: tuple[int, ...]
    as_one: bool = False
    view: int = 0
    scalars: Ref | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drop(Message):
    """Forgets what a lost worker has staged, so that others can compute the closures.

    Attributes:
        of: the worker; None for all (synchronous mode).
        below: drops only what was staged under a lower epoch, or where `of` is None, computed from a lower version. So a drop
            that comes late does no harm to a later attempt.
    """

    closures: tuple[int, ...]
    of: int | None
    below: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fence(Message):
    """Refuses from now on messages of worker `fenced` of an epoch below `below`."""

    fenced: int
    below: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot(Message):
    """Takes a shard through snapshot `number`, which rises.

    Attributes:
        phase: "freeze" makes pushes wait, "keep" asks the frozen shard to keep a reference to its state, and "thaw" lets
            pushes go on. A late freeze for a thawed snapshot changes nothing.
    """

    phase: Literal["freeze", "keep", "thaw"]
    number: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restore(Message):
    """Begins a new history: replaces everything by arrays of `version`, in which these unsettled closures are `applied`."""

    version: int = 0
    applied: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """Answer to a message that was taken, now or before; `version` is the shard's."""

    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters(Done):
    """Answer to a pull; the arrays come with it where they have `changed` since the version that the sender has."""

    changed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held(Done):
    """Answer to a fence: what the shard has of that worker.

    Attributes:
        staged: `(closure, attempt)` of what is staged.
        applied: closures that were applied and are not settled.
        results: `(closure, result)` of those at home on this shard; from the machine a `Ref`, which the shell replaces.
    """

    staged: frozenset[tuple[int, int]]
    applied: frozenset[int]
    results: tuple[tuple[int, bytes], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut(Done):
    """Answer to a snapshot, by closures, as in `shard.Shard`; the arrays can then be read."""

    applied: frozenset[int]
    settled: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refused:
    """Answer to a message that changed nothing; the generation is the shard's."""

    reason: Reason
    generation: int


_MESSAGES = (Pull, Push, Commit, Drop, Fence, Snapshot, Restore)
_ANSWERS = (Done, Parameters, Held, Cut, Refused)
TRAVELLING: dict[str, type] = {kind.__name__: kind for kind in (*_MESSAGES, *_ANSWERS)}
Answer = Done | Parameters | Held | Cut | Refused


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """Command: answer a call."""

    call: Any
    answer: Answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Apply:
    """Command: update the state once, by the weighted mean of gradients.

    Attributes:
        gradients: the arrays, each with its weight; their weighted sum is divided by their number.
        version: the state's version afterwards.
    """

    gradients: tuple[tuple[Ref, float], ...]
    version: int
    scalars: Ref | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forget:
    """Command: let go of arrays or a result that nobody will ask for again."""

    ref: Ref


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replace:
    """Command: replace all arrays by those that came with a restore."""

    version: int


Command = Reply | Apply | Forget | Replace
