"""The part of `session` for one state: joins the closure queue to workers and shards. Users see `api`."""

from __future__ import annotations

import atexit
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from jdist.cluster import exit_status
from jdist.errors import ClosureCancelledError, ShardLostError
from jdist.ps.coordinator.closure_queue import ClosureQueue
from jdist.ps.coordinator.closures import ClusterSnapshot
from jdist.ps.coordinator.shard_watch import ShardWatch
from jdist.ps.coordinator.snapshots import Snapshots
from jdist.ps.coordinator.worker_link import Workers
from jdist.ps.program.shard_plan import ShardPlan
from jdist.ps.protocol.messages import Answer, Commit, Refused, Restore
from jdist.ps.protocol.scheduler_events import Answered, Assign, Decide, Parted, Rollback, Tell
from jdist.ps.protocol.sync_rounds import Rounds
from jdist.ps.protocol.times import Times
from jdist.ps.transport.interface import CallFailed, Channel
from jdist.ps.transport.routed import Copies
from jdist.ps.transport.shard_client import ShardClient, process_name
from jdist.ps.transport.threads import Threads
from jdist.support.versions import difference, versions

_LOG = logging.getLogger(__name__)
MOST_REFUSALS = 5


class Coordinator:
    """Runs the closures of a queue on workers, over shards that keep their state."""

    def __init__(
        self,
        workers: Sequence[Callable[[], Channel]],
        copies: Sequence[Copies],  # of each shard
        plans: Sequence[ShardPlan],
        *,
        times: Times,
        depth: int = 16,  # closures that a worker gets at a time
        rounds: Rounds | None = None,  # how many closures make an update, in synchronous mode
        on_replaced: Callable[[], None] = lambda: None,  # called when another coordinator has taken over
    ):
        shards = [
            ShardClient(each.channel, plan, give_up_s=times.ps_timeout_s)
            for each, plan in zip(copies, plans, strict=True)
        ]
        self.queue = queue = ClosureQueue(shards, times, depth=depth, rounds=rounds, copies=copies)
        self._programs: Sequence[Sequence[bytes]] = ()
        self._on_replaced = on_replaced
        tellers, decider = Threads(2 * len(shards) + 2, "jdist-tell"), Threads(1, "jdist-decide")
        self._pools = tellers, decider, Threads(1, "jdist-snapshot")
        self.snapshots = Snapshots(queue, self._pools[-1])
        self._workers = Workers(workers, queue)
        self._watches = [ShardWatch(n, each, queue) for n, each in enumerate(copies)]
        queue.executors[Assign] = self._workers.assign
        queue.executors[Tell] = lambda command: tellers.submit(self._deliver, command)
        queue.executors[Decide] = lambda command: decider.submit(queue.decide, command.closures)
        queue.snapshot_due = self.snapshots.due
        queue.on_replaced = self._give_way

    def begin(self, kept: Sequence[Sequence[Any]], programs: Sequence[Sequence[bytes]], *, first: int = 0) -> None:
        """Gives each shard its arrays and a packed program for each view, in a new history; starts the workers."""
        # The program of a step that updates nothing is empty. The first closure has number `first`.
        # The first runs last, also after what the program registers from here on. A program may end with
        # closures in flight: their servers are not missed then.
        atexit.register(self._end_if_replaced)
        atexit.register(self.close)
        self._programs = programs
        self.queue.begin(ClusterSnapshot(settled=first, kept=kept))
        # All shards answer before any is led: a new term would break what another job has there.
        times = self.queue.times
        of_copies = [each.statuses(times.lost_after_s, give_up_s=times.ps_timeout_s) for each in self.queue.copies]
        statuses = [status for each in of_copies for status in each if status is not None]
        for status in statuses:
            if (differ := difference(versions(), status.get("versions"), same_step=False)) is not None:
                _LOG.warning("a parameter server has other versions, and may refuse programs: %s", differ.text)
        generation = 1 + max((status["generation"] for status in statuses), default=0)
        # A shard takes nothing before a copy of it leads.
        for watch, each in zip(self._watches, of_copies, strict=True):
            watch.start(each)
        self.queue.handle(Rollback(settled=first, applied=frozenset(), generation=generation))
        self._workers.start()

    def close(self) -> None:
        """Ends all threads and connections; what is in the queue is cancelled."""
        atexit.unregister(self.close)
        if self.queue.replaced_by is None:
            atexit.unregister(self._end_if_replaced)
        self.queue.end(ClosureCancelledError("the coordinator was closed"))
        self._workers.end()
        self.queue.shards.close()
        for pool in self._pools:
            pool.close()
        for threads in (*self._watches, self._workers, *self._pools):
            threads.join(self.queue.times.lost_after_s)

    def _end_if_replaced(self) -> None:
        # No launcher starts it again: two would take turns.
        exit_status.exit_if_uncaught(self.queue.replaced_by, exit_status.USAGE)

    def _give_way(self) -> None:
        self._workers.end()
        self._on_replaced()

    def part(self) -> None:
        """Waits for every closure; later ones never mix with them, even after a rollback."""
        self.queue.join()
        self.queue.handle(Parted(kept=self.queue.newest.settled))

    def state(self) -> ClusterSnapshot:
        """Waits until every closure is done, and returns the state of all shards."""
        while True:
            self.queue.join()
            scheduled, snapshot = self.queue.dispatch.scheduled, self.snapshots.take()
            if snapshot.settled >= scheduled:  # else a shard lost its memory, and closures run again
                return snapshot

    def _deliver(self, command: Tell) -> None:
        """Sends a shard a message until it answers; drops messages of an old history."""
        # This may take long. The shard's watch bounds it.
        queue, message, refusals = self.queue, command.message, 0
        client = queue.shards.clients[command.shard]
        while not queue.closed.is_set() and message.generation == queue.generation:
            try:
                answer = self._answer_to(command, client)
            except ShardLostError as exc:
                refusals += isinstance(exc.__cause__, CallFailed) and exc.__cause__.reason == "refused"
                # It cannot begin with that state. Whatever else fails there leaves it empty, which its watch sees.
                if refusals and (isinstance(message, Restore) or refusals > MOST_REFUSALS):
                    return queue.shard_lost(command.shard, ShardLostError(f"{exc}; see its output"))
                queue.closed.wait(queue.times.ping_s)
                continue
            except Exception as exc:  # whatever it is, nobody may wait for this thread for ever
                queue.shard_lost(command.shard, ShardLostError(f"a parameter server cannot be told: {exc!r}"))
                raise
            is_refused = isinstance(answer, Refused)
            if is_refused and answer.reason in ("empty", "generation") and answer.generation < message.generation:
                # It has lost its memory, or is about to begin this history; it cannot say which.
                queue.closed.wait(queue.times.ping_s)
                continue
            if isinstance(message, Restore) and is_refused and queue.generation == answer.generation:
                begun_by = client.status()["begun_by"]
                if begun_by != process_name():  # else only the first answer was lost
                    return queue.replaced(answer.generation, begun_by)
            return queue.handle(Answered(shard=command.shard, message=message, answer=answer))

    def _answer_to(self, command: Tell, client: ShardClient) -> Answer:
        message, scalars = command.message, None
        if isinstance(message, Restore):
            kept, programs = self.queue.newest.kept[command.shard], self._programs[command.shard]
            return client.restore(message, kept, programs)
        if isinstance(message, Commit) and message.as_one:
            view, scalars = self.queue.scalars_of(message)
            message = dataclasses.replace(message, view=view)
        (answer,), _ = client.say([message], scalars)
        return answer
