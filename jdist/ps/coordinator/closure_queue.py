"""The closures of one coordinator under one lock: who gets which, and whom results and errors reach."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from jdist.errors import (
    ClosureCancelledError,
    ClosureError,
    DatasetError,
    JDistError,
    JobReplacedError,
    NoWorkersError,
    ShardLostError,
)
from jdist.ps.coordinator.closures import Closure, Closures, ClusterSnapshot, Function
from jdist.ps.coordinator.datasets import BatchName, RemoteBatch
from jdist.ps.coordinator.remote_value import Pending, RemoteValue, when_all_arrived
from jdist.ps.program.function_plan import Combine, FunctionPlan
from jdist.ps.protocol import scheduler
from jdist.ps.protocol import scheduler_events as events
from jdist.ps.protocol.messages import Commit
from jdist.ps.protocol.scheduler import Dispatch
from jdist.ps.protocol.sync_rounds import Rounds
from jdist.ps.protocol.times import Times
from jdist.ps.protocol.wire import to_plain
from jdist.ps.transport.interface import Header
from jdist.ps.transport.routed import Copies
from jdist.ps.transport.shard_client import ShardClient, ShardClients
from jdist.ps.transport.threads import uninterrupted

_LOG = logging.getLogger(__name__)
MOST_QUEUED = 262_144  # as in tf.distribute
Report = tuple[events.Reported, list[np.ndarray], ClosureError | None]  # with the results, or the error


class ClosureQueue:
    """Queues and hands out closures as `scheduler.handle` decides; delivers results and errors."""

    # It calls nobody and has no thread; every thread of the coordinator calls it. Source:
    # `_CoordinatedClosureQueue` of tf.distribute's cluster_coordinator.py.

    def __init__(
        self,
        shards: Sequence[ShardClient],
        times: Times,
        *,
        depth: int = 1,
        rounds: Rounds | None = None,
        copies: Sequence[Copies],
    ):
        self.shards, self.copies, self.times = ShardClients(shards), copies, times
        self.newest = ClusterSnapshot(settled=0, kept=())  # all shards go back to this one if one loses its memory
        self.mutex = threading.RLock()
        # Held for anything here; notified at the end, when idle, and of awaited events.
        self.lock = threading.Condition(self.mutex)
        self._is_awaited = False
        # Set at the end. Threads that act at intervals wait for this: events would wake `lock`.
        self.closed = threading.Event()
        self.dispatch = Dispatch(num_shards=len(shards), depth=depth if rounds is None else 1, rounds=rounds)
        self.closures = Closures(have_a_state=bool(shards))
        self.executors: dict[type, Callable[[Any], object]] = {
            events.Finish: self._finish,
            events.Rerun: lambda command: _LOG.warning("%d closures run again", command.count),
        }
        self.snapshot_due: Callable[[], None] = lambda: None
        self.silent: dict[int, tuple[str, float]] = {}
        self.finished_at_s = time.monotonic()
        self.no_workers: NoWorkersError | None = None
        self.replaced_by: JobReplacedError | None = None
        self.on_replaced: Callable[[], None] = lambda: None
        self._numbers = itertools.count()  # of functions
        self._to_come = 0  # closures that wait for arguments
        self._error: JDistError | None = None
        self.lost: dict[int, ShardLostError] = {}  # shards that were given up, until they answer
        self._scalars: dict[tuple[int, ...], list[np.ndarray]] = {}  # of the update in progress
        self._rounds_skipped = 0

    def begin(self, newest: ClusterSnapshot) -> None:
        """Begins with a state that contains all closures so far."""
        self.newest, self.closures.next_number = newest, newest.settled
        self.dispatch = dataclasses.replace(self.dispatch, scheduled=newest.settled, next=newest.settled)

    def routes(self) -> Header:
        """Returns where the leader of each shard is, as workers are told."""
        return {"routes": [to_plain(copies.channel.route) for copies in self.copies]}

    @property
    def generation(self) -> int:
        """The shards' present history."""
        return self.dispatch.generation

    @property
    def num_skipped(self) -> int:
        """Counts the updates that were left out, as a gradient was not finite."""
        return self._rounds_skipped + self.closures.num_skipped

    @property
    def done(self) -> bool:
        """Returns whether every closure that was scheduled is done."""
        with self.lock:
            return self.dispatch.is_idle and not self._to_come

    def add(self, plan: FunctionPlan, program: bytes, combine: Combine | None = None) -> Function:
        """Makes a function of closures, which is installed on each worker with the first of them there."""
        packed = np.frombuffer(program, np.uint8)
        return Function(number=next(self._numbers), plan=plan, program=packed, combine=combine)

    def schedule(self, function: Function, arguments: Sequence[Any], reads: RemoteBatch | None = None) -> Pending:
        """Queues a closure and returns its results to come; waits while the queue is full."""
        # The closure, not the caller, waits for arguments that are a `RemoteValue`. The error of an
        # earlier closure cancels the queue, is raised here once, and is then forgotten.
        arguments = [x if isinstance(x, RemoteValue) else np.array(x) for x in arguments]  # copies
        pending = Pending(cancel=self.cancel)
        with self.lock:
            self._wait_for_room()
        with uninterrupted():
            with self.lock:
                if reads is not None:
                    reads.of_pass.use(reads, pending)
                self._to_come += 1
            when_all_arrived(
                [p for x in arguments if isinstance(x, RemoteValue) for p in x.pending],
                lambda: self._put(function, arguments, pending, reads),
            )
        return pending

    def schedule_round(self, function: Function, arguments: Sequence[Sequence[Any]]) -> list[Pending]:
        """Puts closures that make one update into the queue, all at once; as `schedule`."""
        cast = [function.cast([np.array(x) for x in each]) for each in arguments]
        with self.lock:
            self._wait_for_room()
        with uninterrupted(), self.lock:
            pending = [Pending() for _ in cast]
            for each, result in zip(cast, pending, strict=True):
                self.closures.put(function, each, result)
            self.handle(events.Scheduled(count=len(pending)))
        return pending

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until every closure is done; raises the error of a failed one."""
        with self.lock:
            if not self.lock.wait_for(lambda: self.done or self.closed.is_set() or bool(self.lost), timeout_s):
                left = self.dispatch.scheduled - self.dispatch.settled + self._to_come
                raise TimeoutError(
                    f"up to {left:,} closures are not done after {timeout_s:g} s; they go on. Wait longer."
                )
            self.raise_error()

    def cancel(self, pending: Sequence[Pending]) -> bool:
        """Cancels closures, all or none; returns False if a worker has had one of them, or they make an update together."""
        with self.lock:
            numbers = frozenset(p.number for p in pending if p.number is not None)
            too_late = any(p.done for p in pending) or not all(map(self.dispatch.is_waiting, numbers))
            if too_late or self.closed.is_set() or self.dispatch.rounds is not None:
                return False
            self._to_come -= sum(p.number is None for p in pending)
            for each in pending:
                each.arrive([], ClosureCancelledError("the program has cancelled it"))
            self.handle(events.Cancelled(only=numbers))
            self.lock.notify_all()
            return True

    def _wait_for_room(self) -> None:
        self.raise_error()
        while not self.closed.is_set() and (
            self.dispatch.scheduled - self.dispatch.settled >= MOST_QUEUED or self.closures.is_too_large
        ):
            self.wait_for_event()
            self.raise_error()
        if self.closed.is_set():
            raise ClosureCancelledError("the coordinator was closed")
        if self.no_workers is not None:
            raise self.no_workers

    def _put(self, function: Function, arguments: list[Any], pending: Pending, reads: RemoteBatch | None) -> None:
        """Puts a closure with complete arguments into the queue."""
        failed = [x.error for x in arguments if isinstance(x, RemoteValue) and x.error is not None]
        error: ClosureError | None = None
        cast: list[np.ndarray] = []
        if failed:
            error = ClosureCancelledError(f"an argument of it failed: {failed[0]}")
        else:
            try:
                cast = function.cast(arguments)
            except Exception as exc:  # noqa: BLE001  # it is this closure's
                error = exc if isinstance(exc, ClosureError) else ClosureError(f"an argument cannot be used: {exc!r}")
        with self.lock:
            if pending.done:
                return  # it was cancelled, and is not waited for any more
            self._to_come -= 1
            if self.closed.is_set():
                error = ClosureCancelledError("the coordinator was closed")
            if error is None:
                self.closures.put(function, cast, pending, reads)
                self.handle(events.Scheduled(count=1))
            else:
                self.lock.notify_all()
        if error is not None:
            pending.arrive([], error)

    def handle(self, *happened: events.Event) -> None:
        """Lets the scheduler decide, and carries out its commands."""
        with self.lock:
            if self.closed.is_set():
                return
            self._carry_out(*happened)
            if self._error is not None and not isinstance(happened[0], events.Cancelled):
                self._cancel_waiting()  # what came back meanwhile, from a worker that was lost
            if self.dispatch.is_idle or self._is_awaited:  # else waking others costs more than the event
                self._is_awaited = False
                self.lock.notify_all()

    def _carry_out(self, *happened: events.Event) -> None:
        self.dispatch, commands = scheduler.handle(self.dispatch, *happened)
        for command in commands:
            self.executors[type(command)](command)

    def _finish(self, command: events.Finish) -> None:
        self.finished_at_s = time.monotonic()
        if self.closures.finish(command, self._error):
            self.snapshot_due()

    def _cancel_waiting(self) -> None:
        dispatch = self.dispatch
        if dispatch.next < dispatch.scheduled or dispatch.returned:
            arrived = frozenset(c for c, closure in self.closures.known.items() if closure.pending.was_there)
            self._carry_out(events.Cancelled(spare=arrived))

    def fail(self, error: JDistError) -> None:
        """Raises an error in the user's next call, and cancels what no worker has."""
        with self.lock:
            self._error = self._error or error
            self._cancel_waiting()
            self.lock.notify_all()

    def raise_error(self) -> None:
        """Raises the user's error, once nothing is under way any more; called with the lock held."""
        if self.replaced_by is not None:
            raise self.replaced_by
        if self._error is not None:
            self.lock.wait_for(lambda: self.done or self.closed.is_set() or bool(self.lost))
        for lost in self.lost.values():
            raise ShardLostError(str(lost))
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait_for_event(self, timeout_s: float | None = None) -> None:
        """Waits until something has happened, or so long; called with the lock held."""
        self._is_awaited = True
        self.lock.wait(timeout_s)

    def end(self, error: JDistError) -> None:
        """Begins nothing any more, and fails what is waited for."""
        with self.lock:
            self.closed.set()
            waiting = self.closures.clear()
            self.lock.notify_all()
        for pending in waiting:
            pending.arrive([], error)

    def take(
        self, assigned: events.Assign, numbers: Sequence[int]
    ) -> tuple[int, list[tuple[Closure, BatchName | None]]]:
        """Chooses closures for a worker; returns `(settled, [(closure, batch name), ...])`."""
        # The scheduler hears of those that the worker cannot compute.
        sender = {"worker": assigned.worker, "epoch": assigned.epoch, "generation": assigned.generation}
        taken = list[tuple[Closure, BatchName | None]]()
        # All at once: what is another worker's to read may be this one's in a moment, if that is lost.
        with self.lock:
            lost = [w for w, known in self.dispatch.workers.items() if known.state != "ready"]
            for closure in self.closures.of(numbers):
                if (reads := closure.reads) is None:
                    taken.append((closure, None))
                    continue
                try:
                    name = reads.of_pass.take(reads, assigned.worker, lost)
                except DatasetError as exc:
                    reported = events.Reported(**sender, closure=closure.number, outcome="void")
                    self.report([(reported, [], ClosureError(f"closure {closure.number}: {exc}"))])
                    continue
                if name is None:
                    self.handle(events.Reported(**sender, closure=closure.number, outcome="declined"))
                else:
                    taken.append((closure, name))
            return self.dispatch.settled, taken

    def report(self, reports: Sequence[Report], skipped: Collection[int] = ()) -> None:
        """Handles a worker's reports: hands results or errors to the waiting callers."""
        # `skipped`: without an update, as a gradient was not finite. Up to an error, the scheduler hears of all at once.
        happened = list[events.Event]()
        with self.lock:
            for reported, results, error in reports:
                if not self.is_present(reported.worker, reported.epoch, reported.generation):
                    break  # a rollback came between, or the worker counts as lost
                for closure in self.closures.of([reported.closure]):
                    closure.pending.arrive(results, error)
                if reported.closure in skipped:
                    self.closures.skipped.add(reported.closure)
                happened.append(reported)
                if error is not None:
                    self.handle(*happened)
                    happened.clear()
                    self.fail(error)
            if happened:
                self.handle(*happened)

    def is_present(self, worker: int, epoch: int, generation: int) -> bool:
        """Returns whether a report is of a worker's present epoch and of the present history; called with the lock held."""
        return (epoch, generation) == (self.epoch_of(worker), self.generation)

    def epoch_of(self, worker: int) -> int:
        """Returns a worker's present epoch; 0 before its first."""
        known = self.dispatch.workers.get(worker)
        return 0 if known is None else known.epoch

    def decide(self, numbers: tuple[int, ...]) -> None:
        """Decides whether staged closures become an update, and keeps what that needs besides the mean (synchronous mode)."""
        with self.lock:
            closures, generation = self.closures.of(numbers), self.generation
            if len(closures) < len(numbers) or not all(closure.pending.done for closure in closures):
                return  # a rollback came between
            failed = next((c.pending.error for c in closures if c.pending.error is not None), None)
            results = [closure.pending.wait(0) for closure in closures] if failed is None else []
        commit, scalars, error = closures[0].function.decide(numbers, results, failed=failed)
        with self.lock:
            if self.generation != generation:
                return  # these are not the results of the present history
            self._scalars = {numbers: scalars}
            self._rounds_skipped += not commit and error is None
            if error is not None:
                self.fail(error)
            self.handle(events.Decided(closures=numbers, commit=commit))

    def scalars_of(self, commit: Commit) -> tuple[int, list[np.ndarray] | None]:
        """Returns which step's an update is that is committed, and what it needs besides the mean."""
        with self.lock:
            first = self.closures.of(commit.closures[:1])
            view = first[0].function.plan.view if first else 0
            return view or 0, self._scalars.get(commit.closures) or None

    def memory_lost(self, shard: int) -> None:
        """Has all shards go back to the newest snapshot, as one is empty: what was done since runs again."""
        with self.lock:
            _LOG.warning("parameter server %d lost its memory", shard)
            done, snapshot = self.closures.go_back(self.newest), self.newest
            self.handle(events.Rollback(settled=snapshot.settled, applied=done, version=snapshot.version))

    def heard_of(self, generation: int, begun_by: str) -> None:
        """Gives way if a shard has begun a later history than this coordinator's."""
        if 0 < self.generation < generation:
            self.replaced(generation, begun_by)

    def replaced(self, generation: int, begun_by: str) -> None:
        """Ends, as another coordinator has taken over the shards; nothing of theirs is touched any more."""
        with self.lock:
            if self.closed.is_set():
                return
            error = self.replaced_by = JobReplacedError(
                f"another coordinator ({begun_by or 'unknown'}) has taken over the parameter servers: their history is number "
                f"{generation}, and this process's was {self.generation}. Their state no longer belongs to this job. "
                "Start one coordinator for them, or give each job servers of its own."
            )
            self.end(error)
        _LOG.error("%s", error)
        self.on_replaced()

    def shard_lost(self, shard: int, error: ShardLostError) -> None:
        """Gives a shard up: what no worker has is cancelled, and until the shard answers nobody waits for the rest."""
        with self.lock:
            if self.closed.is_set():
                return
            self.lost[shard] = error
            self._cancel_waiting()
            for pending in self.closures.pending:
                pending.give_up(error)
            self.lock.notify_all()

    def shard_found(self, shard: int) -> None:
        """Waits again for a shard that was given up: what was with a worker when it went will be done after all."""
        with self.lock:
            self.lost.pop(shard, None)
            for pending in self.closures.pending if not self.lost else ():
                pending.give_up(None)
