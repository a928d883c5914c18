"""What is said to a shard, what it answers, and what it asks of the shell round it.

The words are those of docs/parameter_server_protocol.md. Arrays are not here: a `Ref` names some that the shell keeps.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Ref = Any  # whatever the shell likes to name received arrays by; the machine only hands it back
Reason = Literal["generation", "fenced", "stale", "staged", "unknown", "non_finite", "empty"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """What every message says.

    Attributes:
        call: names the call, for the reply; whatever the shell likes.
        generation: the history of the shards that the sender belongs to.
        settled: closures below this number are done; they may be forgotten.
        worker: the worker's number; None for the coordinator.
        epoch: that worker's epoch.
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
        known: the version that the sender has; None if it has none.
        view: which of the shard's arrays it wants: those that one step reads.
    """

    known: int | None = None
    view: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Push(Message):
    """Brings this shard's part of a closure's gradients, to be applied at once.

    Attributes:
        closure: the closure's number.
        attempt: how often this worker has computed the closure before; a later attempt takes the place of an earlier one.
        base: the version of this shard that the gradients were computed at.
        gradients: the received arrays.
        view: of which step they are.
        finite: whether the gradients of all shards are finite.
        result: what the closure returned, on its home shard; None elsewhere.
    """

    closure: int
    attempt: int = 0
    base: int
    view: int = 0
    gradients: Ref | None = None
    finite: bool = True
    result: Ref | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage(Push):
    """As `Push`, but the gradients are only kept, until a commit or a drop."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Commit(Message):
    """Applies what is staged.

    Attributes:
        closures: their numbers; an update each, in this order.
        as_one: one update for all of them, by the mean of their gradients (synchronous mode).
        view: of which step they are, where that brings scalars.
        scalars: what the update needs besides the mean.
    """

    closures: tuple[int, ...]
    as_one: bool = False
    view: int = 0
    scalars: Ref | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drop(Message):
    """Forgets what a lost worker has staged, so that others may compute the closures.

    Attributes:
        closures: their numbers.
        of: the worker; None: whoever staged them (synchronous mode).
        below: only what it staged under a lower epoch, or where `of` is None, what was computed from a lower version; so a
            drop that comes late does no harm to a later attempt.
    """

    closures: tuple[int, ...]
    of: int | None
    below: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fence(Message):
    """From now on refuses a worker's messages of a lower epoch.

    Attributes:
        fenced: the worker's number.
        below: the epoch.
    """

    fenced: int
    below: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Freeze(Message):
    """Pushes and stages wait from now on.

    Attributes:
        number: of the snapshot that this is for; later ones have higher numbers.
    """

    number: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thaw(Message):
    """Pushes and stages go on; a freeze for this snapshot, or an earlier one, that comes late changes nothing.

    Attributes:
        number: of the snapshot.
    """

    number: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot(Message):
    """Asks for a reference to the state, of a frozen shard."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restore(Message):
    """Begins a new history: everything is replaced.

    Attributes:
        version: the version that the restored arrays have.
        applied: closures that these arrays contain and that are not settled.
    """

    version: int = 0
    applied: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """The message was taken, now or before.

    Attributes:
        version: the shard's version.
    """

    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters(Done):
    """Answer to a pull.

    Attributes:
        changed: whether the arrays are sent with it; not where the sender has them.
    """

    changed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held(Done):
    """Answer to a fence: what the shard has of that worker.

    Attributes:
        staged: `(closure, attempt)` of what is staged.
        applied: closures that were applied and are not settled.
        results: `(closure, result)` of those of which this is the home shard.
    """

    staged: frozenset[tuple[int, int]]
    applied: frozenset[int]
    results: tuple[tuple[int, Ref], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut(Done):
    """Answer to a snapshot; the arrays can then be read.

    Attributes:
        staged: closures that are staged.
        applied: closures that were applied and are not settled.
        settled: closures below this number are settled.
    """

    staged: frozenset[int]
    applied: frozenset[int]
    settled: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refused:
    """The message changed nothing.

    Attributes:
        reason: why, in one word of the protocol.
        version: the shard's version.
        generation: the shard's generation.
    """

    reason: Reason
    version: int
    generation: int


TRAVELLING: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Pull,
        Push,
        Stage,
        Commit,
        Drop,
        Fence,
        Freeze,
        Thaw,
        Snapshot,
        Restore,
        Done,
        Parameters,
        Held,
        Cut,
        Refused,
    )
}
Answer = Done | Parameters | Held | Cut | Refused


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """Command: answer a call.

    Attributes:
        call: which.
        answer: what to say.
    """

    call: Any
    answer: Answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Apply:
    """Command: update the state once, by the weighted mean of gradients.

    Attributes:
        gradients: the arrays, each with its weight; their sum is divided by how many they are.
        version: the state's version afterwards.
        scalars: what came with the commit.
    """

    gradients: tuple[tuple[Ref, float], ...]
    version: int
    scalars: Ref | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forget:
    """Command: arrays or a result that nobody will ask for again.

    Attributes:
        ref: which.
    """

    ref: Ref


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replace:
    """Command: take the arrays that came with a restore in place of all that there are."""

    version: int


Command = Reply | Apply | Forget | Replace
