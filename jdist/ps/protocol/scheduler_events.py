"""The events of the scheduler, and its commands to the shell round it; see `scheduler.handle`."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jdist.ps.protocol.messages import Answer, Message, Ref

# "read": its function changes nothing. "void": it took no effect and never will, as it failed.
# "staged": in synchronous mode, all shards have it, and it takes effect with others.
# "declined": this worker cannot compute it while the same workers are there, as another one reads its batch.
Outcome = Literal["done", "read", "void", "staged", "declined"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduled:
    """Event: so many further closures are scheduled."""

    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parted:
    """Event: what is scheduled from now on begins once all before it is done, also where both run again.

    Attributes:
        kept: closures below are in a snapshot and never run again.
    """

    kept: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Registered:
    """Event: a worker's process is connected, and has no closure."""

    worker: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reported:
    """Event: a worker has finished with a closure.

    Attributes:
        epoch, generation: under which it computed.
        base: the version of the shards that a staged one was computed from.
    """

    worker: int
    epoch: int
    generation: int
    closure: int
    outcome: Outcome = "done"
    base: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lost:
    """Event: a worker does not answer, or its connection of an epoch broke."""

    worker: int
    epoch: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answered:
    """Event: a shard has answered a `Tell`."""

    shard: int
    message: Message
    answer: Answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollback:
    """Event: a shard's memory is gone, and all shards go back to a snapshot.

    Attributes:
        settled: closures below this number are in the snapshot.
        applied: so are these above it.
        version: the shards' version in it.
        generation: the least number of the new history.
    """

    settled: int
    applied: frozenset[int]
    version: int = 0
    generation: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decided:
    """Event: the shell has answered `Decide`: closures become one update, or are dropped and count as done."""

    closures: tuple[int, ...]
    commit: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cancelled:
    """Event: closures that no worker has will not be computed.

    Attributes:
        only: which of them; None for all.
        spare: closures that are computed all the same, as they had been done before a rollback.
    """

    only: frozenset[int] | None = None
    spare: frozenset[int] = frozenset()


Event = Scheduled | Parted | Registered | Reported | Lost | Answered | Rollback | Decided | Cancelled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assign:
    """Command: send a worker closures; epoch and generation are for the shards."""

    worker: int
    epoch: int
    generation: int
    closures: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tell:
    """Command: send a shard a message, again and again until it answers."""

    shard: int
    message: Message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finish:
    """Command: a closure is done.

    Attributes:
        arrived: whether its result came with a worker's report; else a shard kept it.
        result: the shard's name for the result; None if it has arrived, or without one.
    """

    closure: int
    outcome: Outcome = "done"
    arrived: bool = False
    result: Ref | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rerun:
    """Command: report that so many closures which were done are computed again."""

    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decide:
    """Command: decide whether these staged closures become one update, and answer by `Decided`."""

    closures: tuple[int, ...]


Command = Assign | Tell | Finish | Rerun | Decide
