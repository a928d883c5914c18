"""The coordinator: schedules closures, drives the workers, and sorts out what the lost ones leave behind.

What is decided, `dispatch.handle` decides; this file holds functions, arguments, results, threads and connections.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jdist.errors import ClosureCancelledError, ClosureError, JDistError, ShardLostError
from jdist.ps import dispatch as machine
from jdist.ps.dispatch import Dispatch
from jdist.ps.events import (
    Answered,
    Assign,
    Cancelled,
    Event,
    Finish,
    Rerun,
    Rollback,
    Scheduled,
    Tell,
)
from jdist.ps.job import Job
from jdist.ps.keeper import Keeping, specs
from jdist.ps.link import Times, WorkerLink
from jdist.ps.messages import Held, Restore
from jdist.ps.remote_value import Pending
from jdist.ps.shard_watch import ShardWatch
from jdist.ps.shards import ShardClient, Together
from jdist.ps.snapshot import ClusterSnapshot, take_snapshot
from jdist.ps.transport.seam import Channel
from jdist.ps.wire import Spec, to_plain

_LOG = logging.getLogger(__name__)
MOST_QUEUED = 262_144  # as in tf.distribute
SNAPSHOT_EVERY = 1000  # closures, whose arguments are kept until then


@dataclasses.dataclass
class _Closure:
    arguments: list[np.ndarray]
    pending: Pending


class Coordinator:
    """Drives one job over its workers and shards.

    Args:
        workers: makes a channel to each worker.
        shards: the shards, in the order of `job.shards`, not yet restored.
        times: how long it waits.
        depth: closures that a worker gets at a time.
    """

    def __init__(
        self,
        workers: Sequence[Callable[[], Channel]],
        shards: Sequence[ShardClient],
        *,
        times: Times,
        depth: int = 16,
    ):
        self._times = times
        self._shards = Together(shards)
        self.mutex = threading.RLock()
        self.lock = threading.Condition(self.mutex)  # notified of the end, of idleness, and of room in a full queue
        self._is_full = False
        self._dispatch = Dispatch(num_shards=len(shards), depth=depth)
        self._closures: dict[int, _Closure] = {}
        self._error: ClosureError | None = None
        self.closed = False
        self._links = [WorkerLink(number, connect, self, times) for number, connect in enumerate(workers)]
        self._tells = ThreadPoolExecutor(2 * len(shards) + 2, thread_name_prefix="jdist-tell")
        self._job: Job | None = None
        self._install: Callable[[Channel], str] | None = None
        self._programs: Sequence[bytes] = ()
        self._void: set[int] = set()  # since the snapshot: closures that took no effect and never will
        self._since = 0  # closures that have been done since the snapshot
        self._snapshot: ClusterSnapshot | None = None
        self._snapshotting = threading.Lock()
        self._watches = [ShardWatch(number, client, self, times) for number, client in enumerate(shards)]

    def begin(
        self,
        job: Job,
        keepings: Sequence[Keeping],
        program: bytes,
        *,
        kept: Sequence[Sequence[Any]],
        shard_programs: Sequence[bytes],
        generation: int,
    ) -> None:
        """Gives the shards their state and starts the workers.

        Args:
            job: the step.
            keepings: what each shard keeps.
            program: the workers' function, packed.
            kept: each shard's arrays.
            shard_programs: each shard's function, packed.
            generation: the least number of the history that begins.
        """
        self._job = job
        packed = np.frombuffer(program, np.uint8)

        def install(channel: Channel) -> str:
            header = {
                "job": to_plain(job),
                "keepings": [to_plain(k) for k in keepings],
                "program": len(program),
                "as": str(generation),
            }
            answer, _ = channel.call("install", header, [packed], timeout_s=self._times.lost_after_s)
            return answer["name"]

        self._install = install
        self._programs = shard_programs
        self._snapshot = ClusterSnapshot(settled=0, applied=frozenset(), version=0, kept=kept)
        self.handle(Rollback(settled=0, applied=frozenset(), generation=generation))
        for thread in (*self._watches, *self._links):
            thread.start()

    def snapshot(self) -> ClusterSnapshot:
        """The state of all shards as it is now, to which they go back when one of them loses its memory.

        Raises:
            ShardLostError: a shard does not answer.
        """
        while True:
            with self._snapshotting, self.lock:
                generation, settled = self._dispatch.generation, self._dispatch.settled
                void = {c for c in self._void if c < settled}
            found = take_snapshot(
                self._shards,
                generation=generation,
                settled=settled,
                is_wanted=lambda g=generation: self.generation == g and not self.closed,
            )
            with self.lock:
                if found is not None and self._dispatch.generation == generation:
                    self._snapshot, self._since = found, 0
                    self._void -= void
                    for c in [c for c in self._closures if c < settled or c in found.applied]:
                        if self._closures[c].pending.done:
                            del self._closures[c]
                    return found
                self._raise_error()
                if self.closed:
                    raise ShardLostError("the coordinator was closed")

    def memory_lost(self, shard: int) -> None:
        """A shard has begun anew, and is empty: all shards go back to the snapshot, and what was done since runs again."""
        with self.lock:
            found = self._snapshot
            assert found is not None  # the state at the beginning is one
            done = found.applied | {c for c in self._void if c >= found.settled}
            _LOG.warning("parameter server %d lost its memory", shard)
            self.handle(Rollback(settled=found.settled, applied=frozenset(done), version=found.version))

    def schedule(self, arguments: Sequence[Any]) -> Pending:
        """Puts a closure into the queue.

        Args:
            arguments: the arrays of its call, as `job.arguments` describes them.

        Returns:
            Its results, when they are there.

        Raises:
            ClosureError: an earlier closure failed; what was in the queue is cancelled, and the error then forgotten.
        """
        copies = [np.array(x) for x in arguments]
        with self.lock:
            self._raise_error()
            while self._dispatch.scheduled - self._dispatch.settled >= MOST_QUEUED and not self.closed:
                self._is_full = True
                self.lock.wait()
                self._raise_error()
            number = self._dispatch.scheduled
            pending = Pending(number)
            self._closures[number] = _Closure(copies, pending)
            self.handle(Scheduled(count=1))
        return pending

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until every closure is done.

        Raises:
            TimeoutError: they were not after `timeout_s`.
            ClosureError: one of them failed.
        """
        with self.lock:
            if not self.lock.wait_for(lambda: self._dispatch.is_idle or self.closed, timeout_s):
                left = self._dispatch.scheduled - self._dispatch.settled
                raise TimeoutError(f"up to {left:,} closures are not done after {timeout_s:g} s")
            self._raise_error()

    @property
    def done(self) -> bool:
        """Whether every closure that was scheduled is done."""
        with self.lock:
            return self._dispatch.is_idle

    @property
    def generation(self) -> int:
        """The shards' present history."""
        with self.lock:
            return self._dispatch.generation

    @property
    def shards(self) -> Together:
        """The shards."""
        return self._shards

    def close(self) -> None:
        """Ends all threads and connections; what is in the queue is cancelled."""
        with self.lock:
            self.closed = True
            waiting, self._closures = list(self._closures.values()), {}
            self.lock.notify_all()
            for link in self._links:
                link.wake()
        for closure in waiting:
            closure.pending.arrive([], ClosureCancelledError("the coordinator was closed"))
        self._shards.close()
        self._tells.shutdown(wait=False, cancel_futures=True)
        for thread in (*self._watches, *self._links):
            thread.join(self._times.lost_after_s)

    def _raise_error(self) -> None:
        if self._error is not None:
            self.lock.wait_for(lambda: self._dispatch.is_idle or self.closed)
            error, self._error = self._error, None
            raise error

    def handle(self, event: Event) -> None:
        """Lets the machine decide, and carries out what it says."""
        with self.lock:
            if self.closed:
                return
            self._dispatch, commands = machine.handle(self._dispatch, event)
            for command in commands:
                match command:
                    case Assign():
                        self._links[command.worker].assign(command)
                    case Tell():
                        self._tells.submit(self._tell, command)
                    case Finish():
                        self._finish(command)
                    case Rerun():
                        _LOG.warning("%d closures run again", command.count)
            if self._dispatch.is_idle or self._is_full:  # to wake somebody in vain takes longer than the event
                self._is_full = False
                self.lock.notify_all()

    def _finish(self, command: Finish) -> None:
        """A closure is done; if its results did not come with a report, they are here. Its arguments stay until a snapshot."""
        if command.outcome == "void":
            self._void.add(command.closure)
        self._since += 1
        if self._since >= SNAPSHOT_EVERY and self._since % SNAPSHOT_EVERY == 0:
            self._tells.submit(self._snapshot_quietly)
        closure = self._closures.get(command.closure)
        if closure is None or command.worker is not None:
            return
        if command.outcome == "void":
            closure.pending.arrive([], ClosureCancelledError("another closure had failed"))
        else:
            assert self._job is not None  # there are closures of a job only
            closure.pending.arrive(_from_bytes(command.result or b"", specs(self._job.outputs)))

    def _tell(self, command: Tell) -> None:
        """Tells a shard something until it answers."""
        try:
            if isinstance(command.message, Restore):
                assert self._snapshot is not None  # set before the first one
                kept, program = self._snapshot.kept[command.shard], self._programs[command.shard]
                answer = self._shards.clients[command.shard].restore(command.message, kept, program)
            else:
                (answer,), _, results = self._shards.clients[command.shard].say([command.message])
                if isinstance(answer, Held):
                    answer = dataclasses.replace(answer, results=tuple(results.items()))
        except JDistError as exc:
            if not self.closed:
                self.fail(ClosureError(f"a parameter server is lost: {exc}"))
            return
        self.handle(Answered(shard=command.shard, message=command.message, answer=answer))

    def install(self, channel: Channel) -> str:
        """Gives a worker the job; its name there."""
        assert self._install is not None  # set before any link is started
        return self._install(channel)

    def batch(self, numbers: Sequence[int]) -> tuple[int, list[tuple[int, list[np.ndarray]]], list[Spec]]:
        """What is settled, the arguments of closures that are still wanted, and what each of them returns."""
        assert self._job is not None  # there are closures of a job only
        with self.lock:
            wanted = [(c, self._closures[c].arguments) for c in numbers if c in self._closures]
            return self._dispatch.settled, wanted, specs(self._job.outputs)

    def arrived(self, number: int, leaves: list[np.ndarray], error: ClosureError | None) -> None:
        """Hands a closure's results, or its error, to those who wait for them."""
        with self.lock:
            known = self._closures.get(number)
        if known is not None:
            known.pending.arrive(leaves, error)

    def _snapshot_quietly(self) -> None:
        """A snapshot that nobody waits for; a shard that does not answer is its watch's affair."""
        try:
            self.snapshot()
        except JDistError as exc:
            _LOG.info("no snapshot: %s", exc)

    def epoch_of(self, worker: int) -> int:
        """A worker's present epoch; 0 before its first."""
        with self.lock:
            known = self._dispatch.workers.get(worker)
        return 0 if known is None else known.epoch

    def fail(self, error: ClosureError) -> None:
        """Tells the user of an error at the next call, and cancels what no worker has."""
        with self.lock:
            self._error = self._error or error
            self.handle(Cancelled())


def _from_bytes(data: bytes, described: Sequence[Spec]) -> list[np.ndarray]:
    found, start = [], 0
    for spec in described:
        found.append(np.frombuffer(data[start : start + spec.size_bytes], spec.numpy).reshape(spec.shape))
        start += spec.size_bytes
    return found
