"""A worker's connection: connects, sends what is assigned, takes in what comes back; and again after a loss."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from jdist.errors import ClosureError, StrategyError
from jdist.ps.events import Assign, Event, Lost, Registered, Reported
from jdist.ps.transport.seam import CallFailed, Channel, Header
from jdist.ps.wire import Spec

BatchName = tuple[int, int, int, int]  # dataset, pass over it, pipeline, number
WITH_OUTPUTS = ("done", "staged")
_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """How long the coordinator waits for others, in seconds.

    Attributes:
        ping_s: between two questions whether a worker lives.
        lost_after_s: without an answer, after which it counts as lost.
        install_s: for a function to be taken in.
        closure_s: for a batch of closures.
        reconnect_s: between two attempts to reach a lost worker.
        max_losses: how often a worker may be lost within `losses_within_s` before it is not used any more.
        losses_within_s: see `max_losses`.
        no_worker_timeout_s: without any worker, after which the job fails.
        ps_timeout_s: for a parameter server that does not answer, or for another in its place.
    """

    ping_s: float = 1.0
    lost_after_s: float = 10.0
    install_s: float = 60.0
    closure_s: float = 3600.0
    reconnect_s: float = 0.5
    max_losses: int = 8
    losses_within_s: float = 600.0
    no_worker_timeout_s: float = 300.0
    ps_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise StrategyError(f"`Times({name}=...)` is {value!r}; it must be a number above 0.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Closures to be sent together.

    Attributes:
        settled: closures below this number are done.
        closures: their numbers.
        functions: the number of each one's function.
        arguments: the arrays of all, one after the other.
        outputs: what each returns.
        updates: whether each changes the state.
        batches: the name of the batch that the worker reads for each; None for those that bring theirs.
    """

    settled: int
    closures: list[int]
    functions: list[int]
    arguments: list[np.ndarray]
    outputs: list[list[Spec]]
    updates: list[bool]
    batches: list[BatchName | None]

    def returned(self, header: dict[str, Any]) -> list[Spec]:
        """The arrays that come with an answer: the outputs of what is done."""
        found = zip(header["outcomes"], self.outputs, strict=True)
        return [spec for outcome, outputs in found if outcome["outcome"] in WITH_OUTPUTS for spec in outputs]


class Hub(Protocol):
    """What a link needs of the coordinator; see there."""

    mutex: threading.RLock  # of which `lock` is a condition
    lock: threading.Condition
    closed: bool

    def handle(self, event: Event) -> None: ...
    def fail(self, error: ClosureError) -> None: ...
    def attach(self, channel: Channel) -> None: ...
    def routes(self) -> Header: ...
    def install(self, channel: Channel, number: int) -> str: ...
    def open_dataset(self, channel: Channel, dataset: int, pipeline: int) -> None: ...
    def batch(self, numbers: Sequence[int], worker: int) -> Batch: ...
    def quarantine(self, worker: int, why: str) -> None: ...
    def check_workers(self) -> None: ...
    def arrived(self, number: int, leaves: list[np.ndarray], error: ClosureError | None) -> None: ...
    def epoch_of(self, worker: int) -> int: ...


class WorkerLink:
    """One worker, as the coordinator has it.

    Args:
        number: the worker's.
        connect: makes a channel to it.
        hub: the coordinator.
        times: how long it waits.
    """

    def __init__(self, number: int, connect: Callable[[], Channel], hub: Hub, times: Times):
        self.number = number
        self._connect, self._hub, self._times = connect, hub, times
        self._registered, self._lost_at = False, collections.deque[float]()
        self._assigned: collections.deque[Assign] = collections.deque()
        self._refused = False
        # One for each link: what one is assigned, the others need not hear of.
        self._news = threading.Condition(hub.mutex)
        self._thread = threading.Thread(target=self._drive, name=f"jdist-worker-{number}", daemon=True)

    def start(self) -> None:
        """Starts its thread."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits for its end, once the hub is closed."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def assign(self, command: Assign) -> None:
        """Takes closures to be sent; called with the hub's lock held."""
        self._assigned.append(command)
        self._news.notify()

    def wake(self) -> None:
        """Has it look whether the hub is closed; called with the hub's lock held."""
        self._news.notify_all()

    def _drive(self) -> None:
        hub = self._hub
        while not hub.closed:
            channel, hopeless = self._connect(), False
            try:
                hub.attach(channel)
                self._registered = True
                hub.handle(Registered(worker=self.number))
                self._serve(channel)
            except CallFailed as exc:
                if not hub.closed:
                    _LOG.log(self._level(exc), "worker %d: %s", self.number, exc)
                    hopeless = self._is_hopeless(exc)
            except Exception as exc:  # whatever it is, nobody may wait for this thread for ever
                hub.fail(ClosureError(f"worker {self.number} cannot be driven: {exc}"))
                raise
            finally:
                channel.close()
            with hub.lock:
                self._assigned.clear()
                hub.handle(Lost(worker=self.number, epoch=hub.epoch_of(self.number)))
                hub.check_workers()
                if hopeless:
                    return
                hub.lock.wait_for(lambda: hub.closed, self._times.reconnect_s)

    def _level(self, exc: CallFailed) -> int:
        """A lost worker comes back by itself; one with another token does not, and that is said once."""
        refused_before, self._refused = self._refused, exc.reason == "unauthenticated"
        return logging.WARNING if self._refused and not refused_before else logging.INFO

    def _is_hopeless(self, exc: CallFailed) -> bool:
        """Whether the worker is not used any more: it was lost, or refused what it was asked, too often. Tells the hub."""
        now = time.monotonic()
        if self._registered or exc.reason == "refused":
            self._lost_at.append(now)
        self._registered = False
        while self._lost_at and self._lost_at[0] < now - self._times.losses_within_s:
            self._lost_at.popleft()
        if len(self._lost_at) < self._times.max_losses:
            return False
        self._hub.quarantine(
            self.number,
            f"worker {self.number} at {exc.peer} was lost {len(self._lost_at)} times; the last time: {exc.reason}",
        )
        return True

    def _serve(self, channel: Channel) -> None:
        hub, lost, names, opened = self._hub, threading.Event(), dict[int, str](), set[int]()
        pinging = threading.Thread(
            target=self._ping, args=(channel, lost), name=f"jdist-ping-{self.number}", daemon=True
        )
        pinging.start()
        try:
            while True:
                with hub.lock:
                    self._news.wait_for(lambda: bool(self._assigned) or hub.closed or lost.is_set())
                    if hub.closed:
                        return
                    if lost.is_set():
                        raise CallFailed(channel.peer, "unavailable", "it does not answer")
                    assigned = list(self._assigned)
                    self._assigned.clear()
                newest = assigned[-1]  # those of an older history are no closures of this one
                numbers = [c for a in assigned if a.generation == newest.generation for c in a.closures]
                self._execute(channel, names, opened, newest, numbers, lost)
        finally:
            lost.set()
            pinging.join(self._times.lost_after_s)

    def _execute(
        self,
        channel: Channel,
        names: dict[int, str],
        opened: set[int],
        newest: Assign,
        numbers: Sequence[int],
        lost: threading.Event,
    ) -> None:
        hub = self._hub
        batch = hub.batch(numbers, self.number)
        for function in batch.functions:
            if function not in names:
                names[function] = hub.install(channel, function)
        for name in batch.batches:
            if name is not None and name[0] not in opened:
                hub.open_dataset(channel, name[0], name[2])
                opened.add(name[0])
        said = {"epoch": newest.epoch, "generation": newest.generation}
        closures: dict[str, Any] = {"closures": batch.closures, "functions": [names[f] for f in batch.functions]}
        if any(batch.batches):
            closures["batches"] = [None if name is None else list(name) for name in batch.batches]
        answer, results = channel.call(
            "execute",
            {**said, **closures, "worker": self.number, "settled": batch.settled},
            batch.arguments,
            timeout_s=self._times.closure_s,
            expects=batch.returned,
            bulk=sum(s.size_bytes for outputs in batch.outputs for s in outputs) > 1 << 19,
        )
        if lost.is_set():
            raise CallFailed(channel.peer, "unavailable", "it does not answer")
        arrays = iter(results)
        for outcome, outputs, updates in zip(answer["outcomes"], batch.outputs, batch.updates, strict=True):
            closure, how = outcome["closure"], outcome["outcome"]
            if how == "abandoned":
                continue
            leaves = [next(arrays) for _ in outputs] if how in WITH_OUTPUTS else []
            error = ClosureError(f"closure {closure}: {outcome['error']}") if outcome.get("error") else None
            hub.arrived(closure, leaves, error)
            how = "read" if how == "done" and not updates else how
            hub.handle(Reported(worker=self.number, **said, closure=closure, outcome=how, base=outcome.get("base", 0)))
            if error is not None:
                hub.fail(error)
        if any(outcome["outcome"] == "abandoned" for outcome in answer["outcomes"]):
            # It was fenced, or a shard is lost to it: as with a lost worker, the shards say what became of the closures.
            raise CallFailed(channel.peer, "unavailable", "it gave closures up")

    def _ping(self, busy: Channel, lost: threading.Event) -> None:
        """Asks the worker whether it lives, over a connection of its own; if it has not answered for long, ends the other."""
        channel, last = self._connect(), time.monotonic()
        try:
            while not lost.wait(self._times.ping_s):
                try:
                    channel.call("status", self._hub.routes(), timeout_s=self._times.ping_s)
                    last = time.monotonic()
                except CallFailed:
                    if time.monotonic() - last > self._times.lost_after_s:
                        lost.set()
                        busy.close()
                        with self._hub.lock:
                            self.wake()
        finally:
            channel.close()
