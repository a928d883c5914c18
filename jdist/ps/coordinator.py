"""The coordinator: schedules closures, drives the workers, and sorts out what the lost ones leave behind.

What is decided, `dispatch.handle` decides; this file holds functions, arguments, results, threads and connections.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jdist.errors import ClosureCancelledError, ClosureError, JDistError, NoWorkersError, ShardLostError
from jdist.ps import dispatch as machine
from jdist.ps.datasets import DatasetPass
from jdist.ps.dispatch import Dispatch
from jdist.ps.events import (
    Answered,
    Assign,
    Cancelled,
    Decide,
    Decided,
    Event,
    Finish,
    Rerun,
    Rollback,
    Scheduled,
    Tell,
)
from jdist.ps.job import Function
from jdist.ps.keeper import specs
from jdist.ps.link import Batch, BatchName, Times, WorkerLink
from jdist.ps.messages import Answer, Commit, Held, Restore
from jdist.ps.remote_value import Pending, RemoteValue, when_all_arrived
from jdist.ps.replica_watch import Copies, ReplicaWatch
from jdist.ps.rounds import Rounds
from jdist.ps.shard_watch import ShardWatch
from jdist.ps.shards import ShardClient, Together
from jdist.ps.snapshot import ClusterSnapshot, take_snapshot
from jdist.ps.sync_program import Combined
from jdist.ps.transport.seam import CallFailed, Channel, Header
from jdist.ps.wire import Spec, to_plain

Combine = Callable[[Sequence[Sequence[Any]]], Combined]
_LOG = logging.getLogger(__name__)
MOST_QUEUED = 262_144  # as in tf.distribute
MOST_QUEUED_BYTES = 512 << 20  # of the arguments of closures that are not done
SNAPSHOT_EVERY = 1000  # closures, whose arguments are kept until then
MOST_LOGGED_BYTES = 256 << 20  # of the arguments that are kept, beyond which a snapshot is due earlier


@dataclasses.dataclass(frozen=True)
class _Installable:
    """A function as it travels to workers, what it returns, and how several of its closures become one update."""

    function: Function
    program: np.ndarray
    outputs: list[Spec]
    combine: Combine | None


@dataclasses.dataclass
class _Closure:
    function: int
    arguments: list[np.ndarray]
    pending: Pending
    reads: DatasetPass | None = None
    batch: BatchName | None = None

    @property
    def size_bytes(self) -> int:
        return sum(x.nbytes for x in self.arguments)


class Coordinator:
    """Drives functions over workers and shards.

    Args:
        workers: makes a channel to each worker.
        shards: the shards that keep the state, not yet restored.
        addresses: theirs, by which workers reach them.
        times: how long it waits.
        depth: closures that a worker gets at a time.
        rounds: how many closures make an update, in synchronous mode; None in asynchronous mode.
        copies: of each shard, where its two copies are; none where it has one.
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
    ):
        self._times = times
        self._shards, self._addresses = Together(shards), list(addresses)
        self.mutex = threading.RLock()
        self.lock = threading.Condition(
            self.mutex
        )  # notified of the end, of idleness, and of every event that is awaited
        self._is_awaited = False
        self._dispatch = Dispatch(num_shards=len(shards), depth=depth if rounds is None else 1, rounds=rounds)
        self._functions: list[_Installable] = []
        self._closures: dict[int, _Closure] = {}
        self._next_number = 0
        self._to_come = 0  # closures that wait for arguments
        self._queued_bytes, self._logged_bytes = 0, 0  # of closures that are not done, and of those that are
        self.num_skipped = 0  # updates that were left out in synchronous mode
        self._scalars: dict[tuple[int, ...], list[np.ndarray]] = {}  # of updates that are being committed
        self._error: ClosureError | None = None
        self._lost: dict[int, ShardLostError] = {}  # shards that have been given up, until they answer
        self._quarantined: dict[int, str] = {}
        self._worker_seen = time.monotonic()
        self.closed = False
        self._links = [WorkerLink(number, connect, self, times) for number, connect in enumerate(workers)]
        self._tells = ThreadPoolExecutor(2 * len(shards) + 2, thread_name_prefix="jdist-tell")
        self._programs: Sequence[Sequence[bytes]] = ()
        self._void: set[int] = set()  # since the snapshot: closures that had no effect on the state and never will
        self._since = 0  # closures that have been done since the snapshot
        self._snapshot: ClusterSnapshot | None = None
        self._snapshotting, self._snapshots = threading.Lock(), 0
        self._copies = tuple(copies)
        self._watches = [ShardWatch(n, client, self, times) for n, client in enumerate(shards) if not copies]
        self._watches += [ReplicaWatch(n, found, self, times) for n, found in enumerate(copies)]

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
        self._programs = programs
        self._snapshot = ClusterSnapshot(settled=first, applied=frozenset(), version=0, kept=kept)
        self._dispatch = dataclasses.replace(self._dispatch, scheduled=first, next=first)
        self._next_number = first
        for watch in self._watches:  # first, as a shard with a backup takes nothing before it was told who leads
            watch.start()
        self.handle(Rollback(settled=first, applied=frozenset(), generation=generation))
        for link in self._links:
            link.start()

    def highest_generation(self) -> int:
        """The highest that any shard, or copy of one, has seen; asked before `begin`.

        Raises:
            CallFailed: a server does not answer.
        """
        timeout_s = self._times.lost_after_s
        found = [s for copies in self._copies for s in copies.statuses(timeout_s)]
        found = found or [client.status(timeout_s) for client in self._shards.clients]
        return max((status["generation"] for status in found), default=0)

    def add(self, function: Function, program: bytes, combine: Combine | None = None) -> int:
        """Makes a function known, to be installed on each worker that gets a closure of it.

        Args:
            function: what it is.
            program: the function, packed.
            combine: from what each closure of an update returned to what the update needs besides (synchronous mode).

        Returns:
            The number that `schedule` takes.
        """
        with self.lock:
            packed = np.frombuffer(program, np.uint8)
            self._functions.append(_Installable(function, packed, specs(function.outputs), combine))
            return len(self._functions) - 1

    def snapshot(self) -> ClusterSnapshot:
        """The state of all shards as it is now, to which they go back when one of them loses its memory.

        Raises:
            ShardLostError: a shard does not answer.
        """
        while True:
            routes = self.routes()
            try:
                with self._snapshotting:  # two at a time would thaw each other's shards
                    found = self._try_snapshot()
            except ShardLostError:
                if self.routes() == routes:
                    raise
                found = None  # the leader that had it was lost; another has the state
            if found is not None:
                return found
            with self.lock:
                self._raise_error()
                if self.closed:
                    raise ShardLostError("the coordinator was closed")

    def _try_snapshot(self) -> ClusterSnapshot | None:
        """A snapshot, unless the shards begin a new history meanwhile."""
        with self.lock:
            self._snapshots += 1
            number, generation, settled = self._snapshots, self._dispatch.generation, self._dispatch.settled
        found = take_snapshot(
            self._shards,
            number=number,
            generation=generation,
            settled=settled,
            is_wanted=lambda: self.generation == generation and not self.closed,
        )
        with self.lock:
            # Of a closure that is in it nobody could get the result any more, were it not here before a rollback.
            while found is not None and not self._are_done(found, generation):
                self._is_awaited = True
                self.lock.wait()
            if found is None or self._dispatch.generation != generation or self._lost:
                return None
            self._snapshot, self._since = found, 0
            self._void = {c for c in self._void if c >= found.settled}
            for c in [c for c in self._closures if c < found.settled or c in found.applied]:
                if self._closures[c].pending.done:
                    self._logged_bytes -= self._closures.pop(c).size_bytes
            self.lock.notify_all()
            return found

    def _are_done(self, found: ClusterSnapshot, generation: int) -> bool:
        """Whether all closures of a snapshot have been reported, or it is of no use any more."""
        known = self._dispatch
        done = all(c < known.settled or c in known.done for c in found.applied)
        return done or self.closed or known.generation != generation or bool(self._lost)

    def memory_lost(self, shard: int) -> None:
        """A shard has begun anew, and is empty: all shards go back to the snapshot, and what was done since runs again."""
        with self.lock:
            found = self._snapshot
            assert found is not None  # the state at the beginning is one
            done = found.applied | {c for c in self._void if c >= found.settled}
            _LOG.warning("parameter server %d lost its memory", shard)
            # What is not in the snapshot is queued again; closures without effect are not kept once they are done.
            again = [closure for c, closure in self._closures.items() if c >= found.settled and c not in done]
            self._queued_bytes = sum(closure.size_bytes for closure in again)
            self._logged_bytes = sum(closure.size_bytes for closure in self._closures.values()) - self._queued_bytes
            self.handle(Rollback(settled=found.settled, applied=frozenset(done), version=found.version))

    def shard_lost(self, shard: int, error: ShardLostError) -> None:
        """A shard is given up: what no worker has is cancelled, and until the shard answers nobody waits for the rest."""
        with self.lock:
            if self.closed:
                return
            self._lost[shard] = error
            self._cancel()
            for closure in self._closures.values():
                closure.pending.give_up(error)
            self.lock.notify_all()

    def shard_found(self, shard: int) -> None:
        """A shard that was given up is there again: what was with a worker when it went will be done after all."""
        with self.lock:
            self._lost.pop(shard, None)
            for closure in self._closures.values() if not self._lost else ():
                closure.pending.give_up(None)

    def schedule_round(self, function: int, arguments: Sequence[Sequence[Any]]) -> list[Pending]:
        """Puts closures that make one update into the queue, all at once; as `schedule`."""
        with self.lock:
            self._wait_for_room()
            pending = [Pending() for _ in arguments]
            self._to_come += len(pending)
            for given, one in zip(arguments, pending, strict=True):
                self._put(function, [np.array(x) for x in given], one, tell=False)
            self.handle(Scheduled(count=len(pending)))
        return pending

    def schedule(self, function: int, arguments: Sequence[Any], reads: DatasetPass | None = None) -> Pending:
        """Puts a closure into the queue; waits while the queue is full.

        Args:
            function: the number that `add` returned.
            arguments: the arrays of its call, as `Function.arguments` describes them, cast to their dtypes; those that are a
                `RemoteValue` are waited for behind the scenes.
            reads: the dataset of which the worker reads a batch for it.

        Returns:
            Its results, when they are there.

        Raises:
            ClosureError: an earlier closure failed; what was in the queue is cancelled, and the error then forgotten.
            ShardLostError: a shard has not answered for long.
        """
        pending = Pending()
        with self.lock:
            self._wait_for_room()
            self._to_come += 1
        given = [x if isinstance(x, RemoteValue) else np.array(x) for x in arguments]  # the caller may change his
        when_all_arrived(
            [p for x in given if isinstance(x, RemoteValue) for p in x.pending],
            lambda: self._put(function, given, pending, reads),
        )
        return pending

    def _wait_for_room(self) -> None:
        self._raise_error()
        while self._is_full() and not self.closed:
            self._is_awaited = True
            self.lock.wait()
            self._raise_error()
        if self.closed:
            raise ClosureCancelledError("the coordinator was closed")
        if len(self._quarantined) == len(self._links):
            raise NoWorkersError(f"no worker is left: {'; '.join(self._quarantined.values())}")

    def _put(
        self,
        function: int,
        arguments: list[Any],
        pending: Pending,
        reads: DatasetPass | None = None,
        *,
        tell: bool = True,
    ) -> None:
        """Puts a closure whose arguments are there into the queue."""
        failed = [x.error for x in arguments if isinstance(x, RemoteValue) and x.error is not None]
        with self.lock:
            self._to_come -= 1
            if self.closed or failed:
                because = f"an argument of it failed: {failed[0]}" if failed else "the coordinator was closed"
                pending.arrive([], ClosureCancelledError(because))
                self.lock.notify_all()
                return
            described = specs(self._functions[function].function.arguments)
            given = [np.asarray(x, spec.numpy) for x, spec in zip(arguments, described, strict=True)]
            if wrong := [i for i, (x, spec) in enumerate(zip(given, described, strict=True)) if x.shape != spec.shape]:
                i = wrong[0]
                problem = (
                    f"argument {i} has the shape {given[i].shape}; its function was traced for {described[i].shape}"
                )
                pending.arrive([], ClosureError(problem))
                self.lock.notify_all()
                return
            closure = _Closure(function, given, pending, reads)
            pending.number = self._next_number
            self._next_number += 1
            self._closures[pending.number] = closure
            self._queued_bytes += closure.size_bytes
            if tell:
                self.handle(Scheduled(count=1))

    def _is_full(self) -> bool:
        many = self._dispatch.scheduled - self._dispatch.settled >= MOST_QUEUED
        return many or self._queued_bytes > MOST_QUEUED_BYTES or self._logged_bytes > 2 * MOST_LOGGED_BYTES

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until every closure is done.

        Raises:
            TimeoutError: they were not after `timeout_s`.
            ClosureError: one of them failed.
            ShardLostError: a shard has not answered for long.
        """
        with self.lock:
            if not self.lock.wait_for(lambda: self.done or self.closed or bool(self._lost), timeout_s):
                left = self._dispatch.scheduled - self._dispatch.settled + self._to_come
                raise TimeoutError(f"up to {left:,} closures are not done after {timeout_s:g} s")
            self._raise_error()

    @property
    def done(self) -> bool:
        """Whether every closure that was scheduled is done."""
        with self.lock:
            return self._dispatch.is_idle and not self._to_come

    @property
    def scheduled(self) -> int:
        """How many closures were scheduled; the number of the next."""
        with self.lock:
            return self._dispatch.scheduled

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
            self.lock.wait_for(lambda: self.done or self.closed or bool(self._lost))
        for lost in self._lost.values():
            raise ShardLostError(str(lost))
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def handle(self, event: Event) -> None:
        """Lets the machine decide, and carries out what it says."""
        with self.lock:
            if self.closed:
                return
            self._carry_out(event)
            if self._error is not None and not isinstance(event, Cancelled):
                self._cancel()  # what came back meanwhile, from a worker that was lost
            if self._dispatch.is_idle or self._is_awaited:  # to wake somebody in vain takes longer than the event
                self._is_awaited = False
                self.lock.notify_all()

    def _carry_out(self, event: Event) -> None:
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
                case Decide():
                    self._tells.submit(self._decide, command.closures)

    def _decide(self, closures: tuple[int, ...]) -> None:
        """Says whether closures become an update, and keeps what that needs besides."""
        with self.lock:
            found = [self._closures[c] for c in closures if c in self._closures]
            installed = self._functions[found[0].function] if found else None
        if len(found) < len(closures) or installed is None:
            return  # a rollback came between
        commit = True
        try:
            assert installed.combine is not None  # only functions that have it are staged
            combined = installed.combine([closure.pending.wait(0) for closure in found])
            with self.lock:
                self._scalars = {closures: combined.scalars}
            policy = installed.function.non_finite
            if not combined.finite and policy != "apply":
                commit = False
                self.num_skipped += policy == "skip"
                if policy == "raise":
                    self.fail(ClosureError(f"closures {closures}: a gradient is NaN or infinite"))
        except Exception as exc:  # noqa: BLE001  # whatever it is, the round must not wait for this thread for ever
            commit = False
            self.fail(ClosureError(f"closures {closures}: what they gave cannot be put together: {exc}"))
        self.handle(Decided(closures=closures, commit=commit))

    def _cancel(self) -> None:
        dispatch = self._dispatch
        if dispatch.next < dispatch.scheduled or dispatch.returned:
            self._carry_out(
                Cancelled(spare=frozenset(c for c, closure in self._closures.items() if closure.pending.done))
            )

    def _finish(self, command: Finish) -> None:
        """A closure is done; if its results did not come with a report, they are here. Its arguments stay until a snapshot."""
        if command.outcome != "done":
            self._void.add(command.closure)
        closure = self._closures.get(command.closure)
        self._since += 1
        before = self._logged_bytes
        if closure is not None:
            self._queued_bytes -= closure.size_bytes
            if command.outcome == "done":
                self._logged_bytes += closure.size_bytes
            else:
                del self._closures[command.closure]
        if self._since % SNAPSHOT_EVERY == 0 or before <= MOST_LOGGED_BYTES < self._logged_bytes:
            self._tells.submit(self._snapshot_quietly)
        if closure is None or command.arrived:
            return
        if command.outcome == "void":
            closure.pending.arrive([], ClosureCancelledError("another closure had failed"))
        else:
            closure.pending.arrive(_from_bytes(command.result or b"", self._functions[closure.function].outputs))

    def _tell(self, command: Tell) -> None:
        """Tells a shard something until it answers, or nobody wants to know any more; how long it may take its watch says."""
        while not self.closed and command.message.generation == self.generation:
            try:
                answer = self._answer_to(command)
            except ShardLostError as exc:
                if isinstance(exc.__cause__, CallFailed) and exc.__cause__.reason == "refused":
                    return self.shard_lost(command.shard, ShardLostError(f"{exc}; see what it has written"))
                with self.lock:
                    self.lock.wait_for(lambda: self.closed, self._times.ping_s)
                continue
            except Exception as exc:  # whatever it is, nobody may wait for this thread for ever
                self.fail(ClosureError(f"a parameter server cannot be told: {exc!r}"))
                raise
            return self.handle(Answered(shard=command.shard, message=command.message, answer=answer))

    def _answer_to(self, command: Tell) -> Answer:
        if isinstance(command.message, Restore):
            assert self._snapshot is not None  # set before the first one
            kept, programs = self._snapshot.kept[command.shard], self._programs[command.shard]
            return self._shards.clients[command.shard].restore(command.message, kept, programs)
        message, scalars = command.message, None
        if isinstance(message, Commit) and message.as_one:
            scalars = self._scalars.get(message.closures) or None
            with self.lock:
                closure = self._closures.get(message.closures[0])
                view = 0 if closure is None else self._functions[closure.function].function.view or 0
            message = dataclasses.replace(message, view=view)
        (answer,), _, results = self._shards.clients[command.shard].say([message], scalars)
        return dataclasses.replace(answer, results=tuple(results.items())) if isinstance(answer, Held) else answer

    def attach(self, channel: Channel) -> None:
        """Tells a worker where the state is."""
        keepings = [to_plain(client.keeping) for client in self._shards.clients]
        header = {"addresses": self._addresses, "keepings": keepings}
        channel.call("attach", {**header, **self.routes()}, timeout_s=self._times.lost_after_s)

    def routes(self) -> Header:
        """Where the leader of each shard is, as workers are told; nothing where shards have one copy."""
        return {"routes": [to_plain(copies.channel.route) for copies in self._copies]} if self._copies else {}

    def install(self, channel: Channel, number: int) -> str:
        """Gives a worker a function; its name there."""
        found = self._functions[number]
        header = {"function": to_plain(found.function), "program": found.program.size, "number": number}
        answer, _ = channel.call("install", header, [found.program], timeout_s=self._times.install_s)
        return answer["name"]

    def open_dataset(self, channel: Channel, dataset: int, pipeline: int) -> None:
        """Makes a dataset known to a worker."""
        with self.lock:
            header = next(
                closure.reads.dataset.header
                for closure in self._closures.values()
                if closure.reads is not None and closure.reads.dataset.number == dataset
            )
        answer, _ = channel.call("open", {**header, "pipeline": pipeline}, timeout_s=self._times.install_s)
        if "error" in answer:
            self.fail(ClosureError(f"a worker cannot open {header['name']}: {answer['error']}"))

    def batch(self, numbers: Sequence[int], worker: int) -> Batch:
        """Closures out of these that are still wanted; those that read a batch on the worker get the name of one."""
        with self.lock:
            wanted = [(c, self._closures[c]) for c in numbers if c in self._closures]
            for _, closure in wanted:
                if closure.reads is not None and closure.batch is None:
                    closure.batch = closure.reads.take(worker)
            return Batch(
                settled=self._dispatch.settled,
                closures=[c for c, _ in wanted],
                functions=[closure.function for _, closure in wanted],
                arguments=[x for _, closure in wanted for x in closure.arguments],
                outputs=[self._functions[closure.function].outputs for _, closure in wanted],
                updates=[self._functions[closure.function].function.updates for _, closure in wanted],
                batches=[closure.batch for _, closure in wanted],
            )

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

    def quarantine(self, worker: int, why: str) -> None:
        """A worker is not used any more."""
        _LOG.warning("%s. It is not used any more.", why)
        with self.lock:
            self._quarantined[worker] = why
            if len(self._quarantined) == len(self._links):
                self.fail(NoWorkersError(f"no worker is left: {'; '.join(self._quarantined.values())}"))

    def check_workers(self) -> None:
        """Fails what is scheduled if there has been no worker for long."""
        with self.lock:
            now, workers = time.monotonic(), self._dispatch.workers.values()
            if self.done or any(known.state == "ready" for known in workers):
                self._worker_seen = now
            elif now - self._worker_seen > self._times.no_worker_timeout_s and self._error is None:
                self.fail(
                    NoWorkersError(
                        f"no worker has been there for {now - self._worker_seen:.0f} s. What the servers have is whole: fetch "
                        "the state and save it, or start workers and go on."
                    )
                )

    def epoch_of(self, worker: int) -> int:
        """A worker's present epoch; 0 before its first."""
        with self.lock:
            known = self._dispatch.workers.get(worker)
        return 0 if known is None else known.epoch

    def fail(self, error: ClosureError) -> None:
        """Tells the user of an error at the next call, and cancels what no worker has."""
        with self.lock:
            self._error = self._error or error
            self._cancel()
            self.lock.notify_all()


def _from_bytes(data: bytes, described: Sequence[Spec]) -> list[np.ndarray]:
    found, start = [], 0
    for spec in described:
        found.append(np.frombuffer(data[start : start + spec.size_bytes], spec.numpy).reshape(spec.shape))
        start += spec.size_bytes
    return found
