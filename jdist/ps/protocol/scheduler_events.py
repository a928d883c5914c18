"""What happens to the coordinator, and what it asks of the shell round it; see `dispatch.handle`."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jdist.ps.protocol.messages import Answer, Message, Ref

# "read": it changed nothing and was not to. "void": it took no effect and never will.
# "staged": of synchronous mode, it is on all shards, and takes effect with others.
# "declined": nothing of it was computed, as what it reads is for another worker to read.
Outcome = Literal["done", "read", "void", "staged", "declined"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduled:
    """Event: there are further closures.

    Attributes:
        count: how many.
    """

    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parted:
    """Event: what is scheduled from now on begins when all before it is done, also where both are computed again.

    Attributes:
        kept: closures below are in a snapshot, and never run again.
    """

    kept: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Registered:
    """Event: a worker's process is connected, and holds no closure.

    Attributes:
        worker: its number.
    """

    worker: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reported:
    """Event: a worker is through with a closure.

    Attributes:
        worker: its number.
        epoch: under which epoch it computed.
        generation: in which history.
        closure: which.
        outcome: "done"; "read", if its function changes nothing; "void", if it took no effect and never will (it failed);
            "staged", in synchronous mode; "declined", if this worker cannot compute it while the same workers are there.
        base: the version of the shards that what is staged was computed from.
    """

    worker: int
    epoch: int
    generation: int
    closure: int
    outcome: Outcome = "done"
    base: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lost:
    """Event: a worker does not answer, or its connection broke.

    Attributes:
        worker: its number.
        epoch: the epoch of the connection.
    """

    worker: int
    epoch: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answered:
    """Event: a shard has answered a `Tell`.

    Attributes:
        shard: its number.
        message: what it was told.
        answer: what it said.
    """

    shard: int
    message: Message
    answer: Answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollback:
    """Event: a shard's memory is gone; all go back to a snapshot.

    Attributes:
        settled: closures below this number are in the snapshot.
        applied: and these above it.
        version: the shards' version in it.
        generation: the least number that the new history may have.
    """

    settled: int
    applied: frozenset[int]
    version: int = 0
    generation: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decided:
    """Event: what becomes of closures that were staged together.

    Attributes:
        closures: which.
        commit: whether they become one update; else they are forgotten, and count as done.
    """

    closures: tuple[int, ...]
    commit: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cancelled:
    """Event: what no worker has is not to be computed.

    Attributes:
        only: of these closures; None: of all.
        spare: closures that are, all the same: they had been done before a rollback.
    """

    only: frozenset[int] | None = None
    spare: frozenset[int] = frozenset()


Event = Scheduled | Parted | Registered | Reported | Lost | Answered | Rollback | Decided | Cancelled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assign:
    """Command: send a worker closures.

    Attributes:
        worker: its number.
        epoch: its epoch, for the shards.
        generation: the history, for the shards.
        closures: their numbers.
        settled: closures below are done.
    """

    worker: int
    epoch: int
    generation: int
    closures: tuple[int, ...]
    settled: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tell:
    """Command: tell a shard something, again and again until it answers.

    Attributes:
        shard: its number.
        message: what.
    """

    shard: int
    message: Message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finish:
    """Command: a closure is done.

    Attributes:
        closure: which.
        outcome: whether it took effect.
        arrived: whether its result came with a worker's report; else a shard kept it.
        result: the shard's name for it; None if it has arrived, or there is none.
    """

    closure: int
    outcome: Outcome = "done"
    arrived: bool = False
    result: Ref | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rerun:
    """Command: say that closures which were done are computed again.

    Attributes:
        count: how many.
    """

    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decide:
    """Command: say by `Decided` what becomes of closures that are staged, enough for one update.

    Attributes:
        closures: which.
    """

    closures: tuple[int, ...]


Command = Assign | Tell | Finish | Rerun | Decide
