"""The coordinator: schedules closures, drives the workers, and sorts out what the lost ones leave behind.

What is decided, `dispatch.handle` decides; this file holds functions, arguments, results, threads and connections.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jdist.errors import ClosureCancelledError, ClosureError, JDistError
from jdist.ps import dispatch as machine
from jdist.ps.dispatch import (
    Answered,
    Assign,
    Cancelled,
    Dispatch,
    Finish,
    Lost,
    Registered,
    Reported,
    Rerun,
    Rollback,
    Scheduled,
    Tell,
)
from jdist.ps.job import Job
from jdist.ps.keeper import Keeping, specs
from jdist.ps.messages import Held, Restore
from jdist.ps.remote_value import Pending
from jdist.ps.shards import ShardClient, Together
from jdist.ps.transport.seam import CallFailed, Channel
from jdist.ps.wire import Spec, to_plain

_LOG = logging.getLogger(__name__)
MOST_QUEUED = 262_144  # as in tf.distribute


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """How long the coordinator waits for others, in seconds.

    Attributes:
        ping_s: between two questions whether a worker lives.
        lost_after_s: without an answer, after which it counts as lost.
        closure_s: for a batch of closures.
        reconnect_s: between two attempts to reach a lost worker.
    """

    ping_s: float = 1.0
    lost_after_s: float = 10.0
    closure_s: float = 3600.0
    reconnect_s: float = 0.5


@dataclasses.dataclass
class _Closure:
    arguments: list[np.ndarray]
    pending: Pending


@dataclasses.dataclass
class _Worker:
    """A worker's connection.

    Attributes:
        connect: makes a channel to it.
        epoch: of the present incarnation; 0 while there is none.
        assigned: closures that were handed out and not sent yet, each with its generation.
    """

    connect: Callable[[], Channel]
    epoch: int = 0
    assigned: collections.deque[tuple[int, int]] = dataclasses.field(default_factory=collections.deque)


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
        times: Times = Times(),
        depth: int = 16,
    ):
        self._times = times
        self._shards = Together(shards)
        self._lock = threading.Condition()
        self._dispatch = Dispatch(num_shards=len(shards), depth=depth)
        self._closures: dict[int, _Closure] = {}
        self._error: ClosureError | None = None
        self._closed = False
        self._workers = [_Worker(connect) for connect in workers]
        self._tells = ThreadPoolExecutor(2 * len(shards) + 2, thread_name_prefix="jdist-tell")
        self._threads: list[threading.Thread] = []
        self._job: Job | None = None
        self._install: Callable[[Channel], str] | None = None
        self._restore: Callable[[int, Restore], Any] | None = None

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
        self._restore = lambda shard, message: self._shards.clients[shard].restore(
            message, kept[shard], shard_programs[shard]
        )
        self._handle(Rollback(settled=0, applied=frozenset(), generation=generation))
        for number in range(len(self._workers)):
            thread = threading.Thread(target=self._drive, args=(number,), name=f"jdist-worker-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

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
        with self._lock:
            self._raise_error()
            while self._dispatch.scheduled - self._dispatch.settled >= MOST_QUEUED and not self._closed:
                self._lock.wait()
                self._raise_error()
            number = self._dispatch.scheduled
            pending = Pending(number)
            self._closures[number] = _Closure(copies, pending)
            self._handle(Scheduled(count=1))
        return pending

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until every closure is done.

        Raises:
            TimeoutError: they were not after `timeout_s`.
            ClosureError: one of them failed.
        """
        with self._lock:
            if not self._lock.wait_for(lambda: self._dispatch.is_idle or self._closed, timeout_s):
                left = self._dispatch.scheduled - self._dispatch.settled
                raise TimeoutError(f"up to {left:,} closures are not done after {timeout_s:g} s")
            self._raise_error()

    @property
    def done(self) -> bool:
        """Whether every closure that was scheduled is done."""
        with self._lock:
            return self._dispatch.is_idle

    @property
    def generation(self) -> int:
        """The shards' present history."""
        with self._lock:
            return self._dispatch.generation

    @property
    def shards(self) -> Together:
        """The shards."""
        return self._shards

    def close(self) -> None:
        """Ends all threads and connections; what is in the queue is cancelled."""
        with self._lock:
            self._closed = True
            waiting, self._closures = list(self._closures.values()), {}
            self._lock.notify_all()
        for closure in waiting:
            closure.pending.arrive([], ClosureCancelledError("the coordinator was closed"))
        self._shards.close()
        self._tells.shutdown(wait=False, cancel_futures=True)
        for thread in self._threads:
            thread.join(self._times.lost_after_s)

    def _raise_error(self) -> None:
        if self._error is not None:
            self._lock.wait_for(lambda: self._dispatch.is_idle or self._closed)
            error, self._error = self._error, None
            raise error

    def _handle(self, event: machine.Event) -> None:
        """Lets the machine decide, and carries out what it says."""
        with self._lock:
            if self._closed:
                return
            self._dispatch, commands = machine.handle(self._dispatch, event)
            for command in commands:
                match command:
                    case Assign():
                        worker = self._workers[command.worker]
                        worker.epoch = command.epoch
                        worker.assigned.extend((command.generation, c) for c in command.closures)
                    case Tell():
                        self._tells.submit(self._tell, command)
                    case Finish(worker=None):
                        self._finish(command)
                    case Rerun():
                        _LOG.warning("%d closures run again", command.count)
            self._lock.notify_all()

    def _finish(self, command: Finish) -> None:
        """A closure whose results did not come with a report."""
        closure = self._closures.pop(command.closure, None)
        if closure is None:
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
                assert self._restore is not None  # set before the first one
                answer = self._restore(command.shard, command.message)
            else:
                (answer,), _, results = self._shards.clients[command.shard].say([command.message])
                if isinstance(answer, Held):
                    answer = dataclasses.replace(answer, results=tuple(results.items()))
        except JDistError as exc:
            if not self._closed:
                self._fail(ClosureError(f"a parameter server is lost: {exc}"))
            return
        self._handle(Answered(shard=command.shard, message=command.message, answer=answer))

    def _fail(self, error: ClosureError) -> None:
        with self._lock:
            self._error = self._error or error
            self._handle(Cancelled())

    def _drive(self, number: int) -> None:
        """A worker's thread: connects, sends what is assigned, takes in what comes back; and again after a loss."""
        worker = self._workers[number]
        while not self._closed:
            channel = worker.connect()
            try:
                assert self._install is not None  # set before the thread was started
                job = self._install(channel)
                self._handle(Registered(worker=number))
                self._serve(number, worker, channel, job)
            except CallFailed as exc:
                if not self._closed:
                    _LOG.info("worker %d: %s", number, exc)
            except Exception as exc:  # whatever it is, nobody may wait for this thread for ever
                self._fail(ClosureError(f"worker {number} cannot be driven: {exc}"))
                raise
            finally:
                channel.close()
            with self._lock:
                worker.assigned.clear()
                self._handle(Lost(worker=number, epoch=self._epoch_of(number)))
                self._lock.wait_for(lambda: self._closed, self._times.reconnect_s)

    def _epoch_of(self, number: int) -> int:
        known = self._dispatch.workers.get(number)
        return 0 if known is None else known.epoch

    def _serve(self, number: int, worker: _Worker, channel: Channel, job: str) -> None:
        lost = threading.Event()
        pinging = threading.Thread(
            target=self._ping, args=(worker, channel, lost), name=f"jdist-ping-{number}", daemon=True
        )
        pinging.start()
        try:
            while not self._closed:
                with self._lock:
                    self._lock.wait_for(lambda: bool(worker.assigned) or self._closed or lost.is_set())
                    if self._closed:
                        return
                    if lost.is_set():
                        raise CallFailed(channel.peer, "unavailable", "it does not answer")
                    batch = list(worker.assigned)
                    worker.assigned.clear()
                    epoch, settled = worker.epoch, self._dispatch.settled
                    known = [(g, c, self._closures[c]) for g, c in batch if c in self._closures]
                for generation in sorted({g for g, _, _ in known}):
                    mine = [(c, closure) for g, c, closure in known if g == generation]
                    self._execute(number, channel, job, epoch, generation, settled, mine, lost)
        finally:
            lost.set()
            pinging.join(self._times.lost_after_s)

    def _execute(
        self,
        number: int,
        channel: Channel,
        job: str,
        epoch: int,
        generation: int,
        settled: int,
        closures: Sequence[tuple[int, _Closure]],
        lost: threading.Event,
    ) -> None:
        assert self._job is not None  # set before there is a worker
        outputs = specs(self._job.outputs)
        header = {
            "worker": number,
            "job": job,
            "epoch": epoch,
            "generation": generation,
            "settled": settled,
            "closures": [c for c, _ in closures],
        }
        arrays = [x for _, closure in closures for x in closure.arguments]
        answer, results = channel.call(
            "execute",
            header,
            arrays,
            timeout_s=self._times.closure_s,
            expects=lambda header: outputs * sum(o["outcome"] == "done" for o in header["outcomes"]),
            bulk=sum(s.size_bytes for s in outputs) * len(closures) > 1 << 19,
        )
        if lost.is_set():
            raise CallFailed(channel.peer, "unavailable", "it does not answer")
        arrived = iter(results)
        with self._lock:
            for outcome in answer["outcomes"]:
                closure = outcome["closure"]
                if outcome["outcome"] == "abandoned":
                    continue
                leaves = [next(arrived) for _ in outputs] if outcome["outcome"] == "done" else []
                error = ClosureError(f"closure {closure}: {outcome['error']}") if outcome.get("error") else None
                known = self._closures.pop(closure, None)
                if known is not None:
                    known.pending.arrive(leaves, error)
                self._handle(
                    Reported(
                        worker=number, epoch=epoch, generation=generation, closure=closure, outcome=outcome["outcome"]
                    )
                )
                if error is not None:
                    self._fail(error)

    def _ping(self, worker: _Worker, busy: Channel, lost: threading.Event) -> None:
        """Asks a worker whether it lives, over a connection of its own; when it has not answered for long, ends the other."""
        channel = worker.connect()
        last = time.monotonic()
        try:
            while not lost.wait(self._times.ping_s):
                try:
                    channel.call("status", {}, timeout_s=self._times.ping_s)
                    last = time.monotonic()
                except CallFailed:
                    if time.monotonic() - last > self._times.lost_after_s:
                        lost.set()
                        busy.close()
                        with self._lock:
                            self._lock.notify_all()
        finally:
            channel.close()


def _from_bytes(data: bytes, described: Sequence[Spec]) -> list[np.ndarray]:
    found, start = [], 0
    for spec in described:
        found.append(np.frombuffer(data[start : start + spec.size_bytes], spec.numpy).reshape(spec.shape))
        start += spec.size_bytes
    return found
