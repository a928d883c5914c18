"""The coordinator, as the program has it: functions are scheduled, and their results waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jdist.errors import ClosureCancelledError, ClosureError
from jdist.ps.coordinator.closures import MOST_QUEUED, Combine
from jdist.ps.coordinator.dataset_pass import RemoteBatch
from jdist.ps.coordinator.engine import Engine
from jdist.ps.coordinator.interrupts import uninterrupted
from jdist.ps.coordinator.remote_value import Pending, RemoteValue, when_all_arrived
from jdist.ps.coordinator.snapshot import ClusterSnapshot
from jdist.ps.program.function_plan import FunctionPlan
from jdist.ps.protocol.scheduler_events import Parted, Scheduled


class Coordinator:
    """Schedules closures of functions, over the workers and shards of an engine.

    Args:
        engine: it; not yet begun.
    """

    def __init__(self, engine: Engine):
        self.engine = engine

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
            self.engine.handle(Parted(kept=self.engine.snapshots.newest.settled))

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
                left = self.engine.dispatch.scheduled - self.engine.dispatch.settled + self.engine.to_come
                raise TimeoutError(
                    f"up to {left:,} closures are not done after {timeout_s:g} s; they go on. Wait longer, "
                    "or without `timeout_s`."
                )
            self.engine.raise_error()

    def snapshot(self) -> ClusterSnapshot:
        """The state of all shards as it is now, to which they go back when one of them loses its memory.

        Raises:
            ShardLostError: a shard does not answer.
        """
        return self.engine.snapshots.take()

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
