"""The coordinator's machine with its lock, its closures and its errors.

`scheduler.handle` decides. What it decides about closures is done here; what workers and shards are to hear goes to whom
`Coordinator` has connected: `worker_link`, `shard_calls`. What these and the watches over shards hear comes back as events.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jdist.errors import ClosureCancelledError, ClosureError, JDistError, JobReplacedError, ShardLostError
from jdist.ps.coordinator.attendance import Attendance
from jdist.ps.coordinator.closures import Batch, Closures, Installable, decide
from jdist.ps.coordinator.remote_value import Pending
from jdist.ps.coordinator.snapshot import ClusterSnapshot
from jdist.ps.protocol import scheduler as machine
from jdist.ps.protocol.messages import Commit
from jdist.ps.protocol.scheduler import Dispatch
from jdist.ps.protocol.scheduler_events import (
    Assign,
    Cancelled,
    Decided,
    Event,
    Finish,
    Reported,
    Rerun,
    Rollback,
)
from jdist.ps.protocol.sync_rounds import Rounds
from jdist.ps.protocol.times import Times

_LOG = logging.getLogger(__name__)


class Engine:
    """Holds what is scheduled and what became of it. Every thread of the coordinator reads and changes it.

    Args:
        num_workers: how many workers there are.
        num_shards: how many shards keep the state.
        times: how long it waits.
        depth: closures that a worker gets at a time.
        rounds: how many closures make an update, in synchronous mode; None in asynchronous mode.

    Attributes:
        lock: is held by whoever reads or changes what is here; notified of the end, of idleness, and of every event that is
            awaited.
        mutex: of which `lock` is a condition.
        closed: set once all is over; who only asks now and then waits for it, as every notice of `lock` would wake it.
        dispatch: the machine's state.
        closures: those that may have to be computed.
        to_come: how many closures wait for arguments.
        attendance: which workers there are.
        newest: the snapshot to which all shards go back when one of them loses its memory.
        programs: of each shard, packed, for each of its views; empty for a step that updates nothing.
        executors: what carries out a command of the machine, by the command's class.
        snapshot_due: is called when a snapshot should be taken.
        on_end: is called at the end, with the lock held.
        on_replaced: is called when another coordinator has taken over.
        replaced_by: what is raised from then on.
    """

    def __init__(
        self, num_workers: int, num_shards: int, *, times: Times, depth: int = 16, rounds: Rounds | None = None
    ):
        self.mutex = threading.RLock()
        self.lock = threading.Condition(self.mutex)
        self._is_awaited = False
        self.closed = threading.Event()
        self.dispatch = Dispatch(num_shards=num_shards, depth=depth if rounds is None else 1, rounds=rounds)
        self.closures = Closures(have_a_state=num_shards > 0)
        self.attendance = Attendance(num_workers, times)
        self.newest = ClusterSnapshot(settled=0, applied=frozenset(), version=0, kept=[])
        self.programs: Sequence[Sequence[bytes]] = ()
        self.executors: dict[type, Callable[[Any], object]] = {Finish: self._finish, Rerun: _log_rerun}
        self.snapshot_due: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None
        self.on_replaced: Callable[[], None] = lambda: None
        self.replaced_by: JobReplacedError | None = None
        self.to_come = 0
        self._error: JDistError | None = None
        self._lost: dict[int, ShardLostError] = {}  # shards that have been given up, until they answer
        self._scalars: dict[tuple[int, ...], list[np.ndarray]] = {}  # of updates that are being committed
        self._rounds_skipped = 0

    def begin(self, snapshot: ClusterSnapshot, programs: Sequence[Sequence[bytes]]) -> None:
        """Takes in the state with which the shards begin."""
        self.programs, self.newest = programs, snapshot
        self.dispatch = dataclasses.replace(self.dispatch, scheduled=snapshot.settled, next=snapshot.settled)
        self.closures.next_number = snapshot.settled

    @property
    def generation(self) -> int:
        """The shards' present history."""
        return self.dispatch.generation

    def end(self, error: JDistError) -> None:
        """Begins nothing any more, and fails what is waited for."""
        with self.lock:
            self.closed.set()
            waiting = self.closures.clear()
            self.lock.notify_all()
            self.on_end()
        for pending in waiting:
            pending.arrive([], error)

    @property
    def num_skipped(self) -> int:
        """How many updates were left out, as a gradient was not finite."""
        return self._rounds_skipped + self.closures.num_skipped

    @property
    def is_idle(self) -> bool:
        """Whether every closure that was scheduled is done; called with the lock held."""
        return self.dispatch.is_idle and not self.to_come

    # What happens, and what it leads to

    def handle(self, event: Event) -> None:
        """Lets the machine decide, and carries out what it says."""
        with self.lock:
            if self.closed.is_set():
                return
            self._carry_out(event)
            if self._error is not None and not isinstance(event, Cancelled):
                self._cancel()  # what came back meanwhile, from a worker that was lost
            if self.dispatch.is_idle or self._is_awaited:  # to wake somebody in vain takes longer than the event
                self._is_awaited = False
                self.lock.notify_all()

    def _carry_out(self, event: Event) -> None:
        self.dispatch, commands = machine.handle(self.dispatch, event)
        for command in commands:
            self.executors[type(command)](command)

    def _finish(self, command: Finish) -> None:
        self.attendance.finished()
        if self.closures.finish(command, self._error):
            self.snapshot_due()

    def decide(self, numbers: tuple[int, ...]) -> None:
        """Says whether closures become an update, and keeps what that needs besides."""
        with self.lock:
            found = self.closures.of(numbers)
            if len(found) < len(numbers):
                return  # a rollback came between
            installed = self.installable(found[0].function)
        decision = decide(numbers, found, installed)
        with self.lock:
            self._scalars = {numbers: decision.scalars}
            self._rounds_skipped += decision.is_skipped
            if decision.error is not None:
                self.fail(decision.error)
            self.handle(Decided(closures=numbers, commit=decision.commit))

    def _cancel(self) -> None:
        dispatch = self.dispatch
        if dispatch.next < dispatch.scheduled or dispatch.returned:
            self._carry_out(Cancelled(spare=self.closures.arrived))

    def fail(self, error: JDistError) -> None:
        """Tells the user of an error at the next call, and cancels what no worker has."""
        with self.lock:
            self._error = self._error or error
            self._cancel()
            self.lock.notify_all()

    def cancel(self, pending: Sequence[Pending]) -> bool:
        """Has closures not computed, if no worker has had any of them; whether that is so."""
        with self.lock:
            numbers = frozenset(p.number for p in pending if p.number is not None)
            too_late = any(p.done for p in pending) or not all(map(self.dispatch.is_waiting, numbers))
            if too_late or self.closed.is_set() or self.dispatch.rounds is not None:
                return False
            self.to_come -= sum(p.number is None for p in pending)
            for each in pending:
                each.arrive([], ClosureCancelledError("the program has cancelled it"))
            self.handle(Cancelled(only=numbers))
            self.lock.notify_all()
            return True

    def raise_error(self) -> None:
        """Raises what the user is to be told, once nothing is under way any more; called with the lock held."""
        if self.replaced_by is not None:
            raise self.replaced_by
        if self._error is not None:
            self.lock.wait_for(lambda: self.is_idle or self.closed.is_set() or bool(self._lost))
        for lost in self._lost.values():
            raise ShardLostError(str(lost))
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait_for_event(self, timeout_s: float | None = None) -> None:
        """Waits until something has happened, or so long; called with the lock held."""
        self._is_awaited = True
        self.lock.wait(timeout_s)

    # What shards and those who watch them say

    def memory_lost(self, shard: int) -> None:
        """A shard has begun anew, and is empty: all shards go back to the snapshot, and what was done since runs again."""
        with self.lock:
            found = self.newest
            _LOG.warning("parameter server %d lost its memory", shard)
            done = self.closures.go_back(found)
            self.handle(Rollback(settled=found.settled, applied=done, version=found.version))

    def heard_of(self, generation: int, begun_by: str) -> None:
        """A shard has a history of this number."""
        if 0 < self.generation < generation:
            self.replaced(generation, begun_by)

    def replaced(self, generation: int, begun_by: str) -> None:
        """Another coordinator has taken over the shards: here all ends, and nothing of theirs is touched any more."""
        with self.lock:
            if self.closed.is_set():
                return
            self.replaced_by = JobReplacedError(
                f"another coordinator ({begun_by or 'unknown'}) has taken over the parameter servers: their history is number "
                f"{generation}, and this process's was {self.generation}. What is on them is not this job's any more. Start "
                "one coordinator for them, or give each job servers of its own."
            )
            self.end(self.replaced_by)
        _LOG.error("%s", self.replaced_by)
        self.on_replaced()

    def shard_lost(self, shard: int, error: ShardLostError) -> None:
        """A shard is given up: what no worker has is cancelled, and until the shard answers nobody waits for the rest."""
        with self.lock:
            if self.closed.is_set():
                return
            self._lost[shard] = error
            self._cancel()
            for pending in self.closures.pending:
                pending.give_up(error)
            self.lock.notify_all()

    def shard_found(self, shard: int) -> None:
        """A shard that was given up is there again: what was with a worker when it went will be done after all."""
        with self.lock:
            self._lost.pop(shard, None)
            for pending in self.closures.pending if not self._lost else ():
                pending.give_up(None)

    @property
    def is_a_shard_lost(self) -> bool:
        """Whether one has been given up."""
        return bool(self._lost)

    def state_of(self, shard: int) -> tuple[Sequence[Any], Sequence[bytes]]:
        """What a shard begins with: its arrays, and a program for each of its views."""
        return self.newest.kept[shard], self.programs[shard]

    def scalars_of(self, commit: Commit) -> tuple[int, list[np.ndarray] | None]:
        """Of an update that is committed: which step's it is, and what it needs besides the mean."""
        with self.lock:
            first = self.closures.of(commit.closures[:1])
            view = self.installable(first[0].function).function.view if first else 0
            return view or 0, self._scalars.get(commit.closures) or None

    # What the workers' links ask for

    def installable(self, number: int) -> Installable:
        """A function that is to be installed."""
        return self.closures.function(number)

    def batch(self, assigned: Assign, numbers: Sequence[int]) -> Batch:
        """Closures out of these that are still wanted, and that the worker can compute; the machine hears of the others.

        Args:
            assigned: to whom, and in which history.
            numbers: of the closures.
        """
        with (
            self.lock
        ):  # all at once: what is for another worker to read now may not be in a moment, if that one is lost
            lost = [w for w, known in self.dispatch.workers.items() if known.state != "ready"]
            found = self.closures.batch(numbers, assigned.worker, self.dispatch.settled, lost)
            said = {"worker": assigned.worker, "epoch": assigned.epoch, "generation": assigned.generation}
            for closure in found.declined:
                self.handle(Reported(**said, closure=closure, outcome="declined"))
            for closure, error in found.failed.items():
                self.arrived(closure, [], error)
                self.handle(Reported(**said, closure=closure, outcome="void"))
                self.fail(error)
            return found

    def ended(self, number: int, pipeline: int, count: int) -> None:
        """What a closure was to read is not there: the share has only so many batches."""
        with self.lock:
            for closure in self.closures.of([number]):
                if closure.reads is not None:
                    closure.reads.reads.ended(pipeline, count)

    def arrived(self, number: int, leaves: list[np.ndarray], error: ClosureError | None) -> None:
        """Hands a closure's results, or its error, to those who wait for them."""
        with self.lock:
            known = self.closures.of([number])
        for closure in known:
            closure.pending.arrive(leaves, error)

    def is_present(self, worker: int, epoch: int, generation: int) -> bool:
        """Whether a worker's report is of its present epoch and of the present history; called with the lock held."""
        return (epoch, generation) == (self.epoch_of(worker), self.dispatch.generation)

    def skipped(self, number: int) -> None:
        """A closure's update was left out, as a gradient was not finite."""
        with self.lock:
            self.closures.skipped(number)

    def epoch_of(self, worker: int) -> int:
        """A worker's present epoch; 0 before its first."""
        with self.lock:
            known = self.dispatch.workers.get(worker)
        return 0 if known is None else known.epoch

    def quarantine(self, worker: int, why: str) -> None:
        """Excludes a worker for the rest of the job."""
        _LOG.warning("%s. It is not used any more.", why)
        with self.lock:
            self.attendance.quarantine(worker, why)
            if (error := self.attendance.none_left()) is not None:
                self.fail(error)

    def check_workers(self) -> None:
        """Fails what is scheduled if there has been no worker for long; says for whom all wait if no closure finishes."""
        with self.lock:
            self.attendance.warn_of_standstill(self.dispatch, is_idle=self.is_idle)
            error = self.attendance.missing(self.dispatch, is_idle=self.is_idle)
            if error is not None and self._error is None:
                self.fail(error)

    @property
    def num_unfinished(self) -> int:
        """How many closures are not done; called with the lock held."""
        return self.dispatch.scheduled - self.dispatch.settled + self.to_come


def _log_rerun(command: Rerun) -> None:
    _LOG.warning("%d closures run again", command.count)
