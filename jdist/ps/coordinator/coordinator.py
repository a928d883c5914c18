"""The coordinator of one state: schedules functions on workers, has shards updated, and waits for results."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jdist.cluster import exit_status
from jdist.errors import ClosureCancelledError, ClosureError
from jdist.ps.coordinator.closures import MOST_QUEUED, Combine
from jdist.ps.coordinator.dataset_pass import RemoteBatch
from jdist.ps.coordinator.engine import Engine
from jdist.ps.coordinator.interrupts import uninterrupted
from jdist.ps.coordinator.remote_value import Pending, RemoteValue, when_all_arrived
from jdist.ps.coordinator.replica_watch import Copies, ReplicaWatch
from jdist.ps.coordinator.shard_calls import ShardCalls
from jdist.ps.coordinator.shard_watch import ShardWatch
from jdist.ps.coordinator.snapshot import ClusterSnapshot
from jdist.ps.coordinator.snapshots import Snapshots
from jdist.ps.coordinator.worker_link import Briefing, WorkerLink
from jdist.ps.program.function_plan import FunctionPlan
from jdist.ps.protocol.scheduler_events import Assign, Decide, Parted, Rollback, Scheduled, Tell
from jdist.ps.protocol.sync_rounds import Rounds
from jdist.ps.protocol.times import Times
from jdist.ps.transport.interface import Channel
from jdist.ps.transport.shard_client import ShardClient, Together
from jdist.ps.transport.threads import Threads


class Coordinator:
    """Schedules closures of functions over workers and shards, and waits for them.

    Args:
        workers: makes a channel to each worker.
        shards: the shards that keep the state, not yet restored.
        addresses: theirs, by which workers reach them.
        times: how long it waits.
        depth: closures that a worker gets at a time.
        rounds: how many closures make an update, in synchronous mode; None in asynchronous mode.
        copies: of each shard, where its two copies are; none where it has one.
        on_replaced: is called when another coordinator has taken over.

    Attributes:
        engine: what is scheduled, and its lock.
        shards: the shards.
        snapshots: takes snapshots.
    """

    def __init__(
        self,
        workers: Sequence[Callable[[], Channel]],
        shards: Sequence[ShardClient],
        *,
        addresses: Sequence[str],
        times: Times,
        depth: int = 16,
        rounds: Rounds | None = None,
        copies: Sequence[Copies] = (),
        on_replaced: Callable[[], None] = lambda: None,
    ):
        self.shards, self._times, self._copies = Together(shards), times, tuple(copies)
        self.engine = engine = Engine(len(workers), len(shards), times=times, depth=depth, rounds=rounds)
        briefing = Briefing(shards, addresses, copies, times)
        self._links = [WorkerLink(n, connect, engine, briefing, times) for n, connect in enumerate(workers)]
        self._calls = ShardCalls(self.shards, engine, times)
        self._deciding = Threads(1, "jdist-decide")
        self.snapshots = Snapshots(self.shards, engine, briefing.routes, give_up_s=2 * times.ps_timeout_s)
        self._watches = [ShardWatch(n, client, engine, times) for n, client in enumerate(shards) if not copies]
        self._watches += [ReplicaWatch(n, found, engine, times) for n, found in enumerate(copies)]
        engine.executors[Assign] = lambda command: self._links[command.worker].assign(command)
        engine.executors[Tell] = self._calls.tell
        engine.executors[Decide] = lambda command: self._deciding.submit(engine.decide, command.closures)
        engine.snapshot_due, engine.on_replaced, engine.on_end = self.snapshots.due, on_replaced, self._end_links

    def begin(
        self, kept: Sequence[Sequence[Any]], programs: Sequence[Sequence[bytes]], *, first: int = 0, generation: int = 0
    ) -> None:
        """Gives the shards their state and starts the workers.

        Args:
            kept: each shard's arrays.
            programs: of each shard, packed, for each of its views; empty for a step that updates nothing.
            first: the first closure's number.
            generation: the least number of the history that begins.

        Raises:
            ShardLostError: a shard does not answer.
        """
        atexit.register(self._end_if_replaced)  # runs after `close`, and after what the program registers from here on
        # A program may end without a word, or by an exception, with closures in flight: their servers are not missed then.
        atexit.register(self.close)
        self.engine.begin(ClusterSnapshot(settled=first, applied=frozenset(), version=0, kept=kept), programs)
        for watch in self._watches:  # first, as a shard with a backup takes nothing before it was told who leads
            watch.start()
        self.engine.handle(Rollback(settled=first, applied=frozenset(), generation=generation))
        for link in self._links:
            link.start()

    def highest_generation(self) -> int:
        """Returns the highest history that any shard, or copy of one, has seen; asked before `begin`.

        Raises:
            ShardLostError: a shard does not answer.
        """
        timeout_s = self._times.lost_after_s
        found = [s for copies in self._copies for s in copies.statuses(timeout_s) if s is not None]
        found = found or [client.status() for client in self.shards.clients]
        return max((status["generation"] for status in found), default=0)

    def close(self) -> None:
        """Ends all threads and connections; what is in the queue is cancelled."""
        atexit.unregister(self.close)
        if self.engine.replaced_by is None:
            atexit.unregister(self._end_if_replaced)
        self.engine.end(ClosureCancelledError("the coordinator was closed"))
        self.shards.close()
        self._calls.close()
        self.snapshots.close()
        self._deciding.close()
        for thread in (*self._watches, *self._links, self._calls, self.snapshots, self._deciding):
            thread.join(self._times.lost_after_s)

    def _end_links(self) -> None:
        for link in self._links:
            link.end()

    def _end_if_replaced(self) -> None:
        # No launcher starts it again: two would take turns.
        exit_status.exit_if_uncaught(self.engine.replaced_by, exit_status.USAGE)

    def add(self, function: FunctionPlan, program: bytes, combine: Combine | None = None) -> int:
        """Makes a function known, to be installed on each worker that gets a closure of it.

        Args:
            function: what it is.
            program: the function, packed.
            combine: from what each closure of an update returned to what the update needs besides (synchronous mode).

        Returns:
            The number that `schedule` takes.
        """
        with self.engine.lock:
            return self.engine.closures.add_function(function, program, combine)

    def schedule(self, function: int, arguments: Sequence[Any], reads: RemoteBatch | None = None) -> Pending:
        """Puts a closure into the queue; waits while the queue is full.

        Args:
            function: the number that `add` returned.
            arguments: the arrays of its call, cast to the dtypes of `FunctionPlan.arguments`; those that are a
                `RemoteValue` are waited for behind the scenes.
            reads: the batch that the worker reads for it.

        Returns:
            Its results, when they are there.

        Raises:
            ClosureError: an earlier closure failed; what was in the queue is cancelled, and the error then forgotten.
            ShardLostError: a shard has not answered for long.
            DatasetError: another call has what it reads.
        """
        given = [x if isinstance(x, RemoteValue) else np.array(x) for x in arguments]  # the caller may change his
        pending = Pending(cancel=self.engine.cancel)
        with self.engine.lock:
            self._wait_for_room()
        with uninterrupted():
            with self.engine.lock:
                if reads is not None:
                    reads.reads.use(reads, pending)
                self.engine.to_come += 1
            when_all_arrived(
                [p for x in given if isinstance(x, RemoteValue) for p in x.pending],
                lambda: self._put(function, given, pending, reads),
            )
        return pending

    def schedule_round(self, function: int, arguments: Sequence[Sequence[Any]]) -> list[Pending]:
        """Puts closures that make one update into the queue, all at once; as `schedule`."""
        installed = self.engine.installable(function)
        given = [installed.fitted([np.array(x) for x in each]) for each in arguments]
        with self.engine.lock:
            self._wait_for_room()
        with uninterrupted(), self.engine.lock:
            pending = [Pending() for _ in given]
            for each, one in zip(given, pending, strict=True):
                self.engine.closures.put(function, each, one, None)
            self.engine.handle(Scheduled(count=len(pending)))
        return pending

    def part(self) -> None:
        """Waits until every closure is done; what comes after is never mixed with it, also where both are computed again.

        Raises:
            ClosureError: one of them failed.
            ShardLostError: a shard has not answered for long.
        """
        self.join()
        with self.engine.lock:
            self.engine.handle(Parted(kept=self.engine.newest.settled))

    def _wait_for_room(self) -> None:
        self.engine.raise_error()
        while self._is_full() and not self.engine.closed.is_set():
            self.engine.wait_for_event()
            self.engine.raise_error()
        if self.engine.closed.is_set():
            raise ClosureCancelledError("the coordinator was closed")
        if (error := self.engine.attendance.none_left()) is not None:
            raise error

    def _is_full(self) -> bool:
        return (
            self.engine.dispatch.scheduled - self.engine.dispatch.settled >= MOST_QUEUED
            or self.engine.closures.is_too_large
        )

    def _put(self, function: int, arguments: list[Any], pending: Pending, reads: RemoteBatch | None) -> None:
        """Puts a closure whose arguments are there into the queue."""
        failed = [x.error for x in arguments if isinstance(x, RemoteValue) and x.error is not None]
        error: ClosureError | None = None
        given: list[np.ndarray] = []
        if failed:
            error = ClosureCancelledError(f"an argument of it failed: {failed[0]}")
        else:
            try:
                given = self.engine.installable(function).fitted(arguments)
            except Exception as exc:  # noqa: BLE001  # whatever it is, it is this closure's, and others wait for it
                error = exc if isinstance(exc, ClosureError) else ClosureError(f"an argument cannot be taken: {exc!r}")
        with self.engine.lock:
            if pending.done:
                return  # it was cancelled, and is not waited for any more
            self.engine.to_come -= 1
            if self.engine.closed.is_set():
                error = ClosureCancelledError("the coordinator was closed")
            if error is None:
                self.engine.closures.put(function, given, pending, reads)
                self.engine.handle(Scheduled(count=1))
            else:
                self.engine.lock.notify_all()
        if error is not None:
            pending.arrive([], error)

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until every closure is done.

        Raises:
            TimeoutError: they were not after `timeout_s`.
            ClosureError: one of them failed.
            ShardLostError: a shard has not answered for long.
        """
        with self.engine.lock:
            if not self.engine.lock.wait_for(
                lambda: self.done or self.engine.closed.is_set() or self.engine.is_a_shard_lost, timeout_s
            ):
                raise TimeoutError(
                    f"up to {self.engine.num_unfinished:,} closures are not done after {timeout_s:g} s; they go on. Wait "
                    "longer, or without `timeout_s`."
                )
            self.engine.raise_error()

    def snapshot(self) -> ClusterSnapshot:
        """The state of all shards as it is now, to which they go back when one of them loses its memory.

        Raises:
            ShardLostError: a shard does not answer.
        """
        return self.snapshots.take()

    def state(self) -> ClusterSnapshot:
        """Waits until every closure is done; the state of all shards after all of them.

        Raises:
            ClosureError: one of them failed.
            ShardLostError: a shard does not answer.
        """
        while True:
            self.join()
            scheduled, found = self.scheduled, self.snapshot()
            if found.settled >= scheduled:  # else a shard has lost its memory in between, and they run again
                return found

    @property
    def done(self) -> bool:
        """Whether every closure that was scheduled is done."""
        with self.engine.lock:
            return self.engine.is_idle

    @property
    def scheduled(self) -> int:
        """How many closures were scheduled; the number of the next."""
        with self.engine.lock:
            return self.engine.dispatch.scheduled
