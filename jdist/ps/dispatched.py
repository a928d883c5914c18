"""What the coordinator's machine knows; see `dispatch`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from jdist.ps.messages import Held, Message
from jdist.ps.rounds import Rounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worker:
    """What the coordinator knows of one worker.

    Attributes:
        epoch: its present epoch, or the one that its next incarnation begins after.
        state: "absent", "ready", or "fencing": lost, and its closures are not sorted out yet.
        waits: whether a new incarnation is connected, which may begin once the old one is sorted out.
        closures: what it has.
        declined: what it cannot compute while the same workers are there.
    """

    epoch: int = 0
    state: Literal["absent", "ready", "fencing"] = "absent"
    waits: bool = False
    closures: tuple[int, ...] = ()
    declined: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recovery:
    """A lost worker's closures, while they are sorted out.

    Attributes:
        held: what each shard that has answered the fence has of them.
        commit: closures that all shards commit; known once all have answered the fence.
        drop: the others, which go back into the queue.
        unanswered: shards that have not answered the present question.
        asks: the question.
    """

    held: Mapping[int, Held] = dataclasses.field(default_factory=dict)
    commit: tuple[int, ...] = ()
    drop: tuple[int, ...] = ()
    unanswered: frozenset[int] = frozenset()
    asks: Message | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dispatch:
    """The coordinator's state; immutable.

    Attributes:
        num_shards: how many shards there are.
        depth: closures that a worker may have at a time.
        window: closures that may be handed out beyond the first that is not done.
        generation: the shards' present history.
        scheduled: how many closures were scheduled; their numbers are below.
        next: the first that no worker ever had, but for some that were cancelled.
        returned: those that come before it: taken back from a lost worker, declined by one, or undone.
        done: those at or above `settled` that are done, or will never be.
        settled: all below are done.
        workers: by number.
        recoveries: of the workers in "fencing".
        restoring: shards that have not yet acknowledged the present history; nothing is handed out meanwhile.
        parts: closures at or above each of these numbers are handed out when all below it are done; rising.
        rounds: the update that is being made, in synchronous mode; None in asynchronous mode.
    """

    num_shards: int
    depth: int = 1
    window: int = 1024
    generation: int = 0
    scheduled: int = 0
    next: int = 0
    returned: tuple[int, ...] = ()
    done: frozenset[int] = frozenset()
    settled: int = 0
    workers: Mapping[int, Worker] = dataclasses.field(default_factory=dict)
    recoveries: Mapping[int, Recovery] = dataclasses.field(default_factory=dict)
    restoring: frozenset[int] = frozenset()
    parts: tuple[int, ...] = ()
    rounds: Rounds | None = None

    @property
    def is_idle(self) -> bool:
        """Whether every closure that was scheduled is done."""
        return self.settled == self.scheduled

    def is_waiting(self, closure: int) -> bool:
        """Whether a closure is to be computed, and no worker has it."""
        if closure >= max(self.next, self.settled):
            return closure < self.scheduled and closure not in self.done
        return closure in self.returned
