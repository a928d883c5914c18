"""A worker's connection: connects, sends what is assigned, takes in what comes back; and again after a loss."""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from jdist.errors import ClosureError
from jdist.ps.events import Assign, Event, Lost, Registered, Reported
from jdist.ps.transport.seam import CallFailed, Channel
from jdist.ps.wire import Spec

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """How long the coordinator waits for others, in seconds.

    Attributes:
        ping_s: between two questions whether a worker lives.
        lost_after_s: without an answer, after which it counts as lost.
        closure_s: for a batch of closures.
        reconnect_s: between two attempts to reach a lost worker.
        ps_timeout_s: for a parameter server that does not answer, or for another in its place.
    """

    ping_s: float = 1.0
    lost_after_s: float = 10.0
    closure_s: float = 3600.0
    reconnect_s: float = 0.5
    ps_timeout_s: float = 120.0


class Hub(Protocol):
    """What a link needs of the coordinator; see there."""

    mutex: threading.RLock  # of which `lock` is a condition
    lock: threading.Condition
    closed: bool

    def handle(self, event: Event) -> None: ...
    def fail(self, error: ClosureError) -> None: ...
    def install(self, channel: Channel) -> str: ...
    def batch(self, numbers: Sequence[int]) -> tuple[int, list[tuple[int, list[np.ndarray]]], list[Spec]]: ...
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
        self._assigned: collections.deque[Assign] = collections.deque()
        self._news = threading.Condition(
            hub.mutex
        )  # one for each link: what one is assigned, the others need not hear of
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
            channel = self._connect()
            try:
                job = hub.install(channel)
                hub.handle(Registered(worker=self.number))
                self._serve(channel, job)
            except CallFailed as exc:
                if not hub.closed:
                    _LOG.info("worker %d: %s", self.number, exc)
            except Exception as exc:  # whatever it is, nobody may wait for this thread for ever
                hub.fail(ClosureError(f"worker {self.number} cannot be driven: {exc}"))
                raise
            finally:
                channel.close()
            with hub.lock:
                self._assigned.clear()
                hub.handle(Lost(worker=self.number, epoch=hub.epoch_of(self.number)))
                hub.lock.wait_for(lambda: hub.closed, self._times.reconnect_s)

    def _serve(self, channel: Channel, job: str) -> None:
        hub, lost = self._hub, threading.Event()
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
                self._execute(channel, job, newest, numbers, lost)
        finally:
            lost.set()
            pinging.join(self._times.lost_after_s)

    def _execute(
        self, channel: Channel, job: str, newest: Assign, numbers: Sequence[int], lost: threading.Event
    ) -> None:
        hub = self._hub
        settled, closures, outputs = hub.batch(numbers)
        said = {"epoch": newest.epoch, "generation": newest.generation}
        answer, results = channel.call(
            "execute",
            {**said, "worker": self.number, "job": job, "settled": settled, "closures": [c for c, _ in closures]},
            [x for _, arguments in closures for x in arguments],
            timeout_s=self._times.closure_s,
            expects=lambda header: outputs * sum(o["outcome"] == "done" for o in header["outcomes"]),
            bulk=sum(s.size_bytes for s in outputs) * len(closures) > 1 << 19,
        )
        if lost.is_set():
            raise CallFailed(channel.peer, "unavailable", "it does not answer")
        arrays = iter(results)
        for outcome in answer["outcomes"]:
            closure, how = outcome["closure"], outcome["outcome"]
            if how == "abandoned":
                continue
            leaves = [next(arrays) for _ in outputs] if how == "done" else []
            error = ClosureError(f"closure {closure}: {outcome['error']}") if outcome.get("error") else None
            hub.arrived(closure, leaves, error)
            hub.handle(Reported(worker=self.number, **said, closure=closure, outcome=how))
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
                    channel.call("status", {}, timeout_s=self._times.ping_s)
                    last = time.monotonic()
                except CallFailed:
                    if time.monotonic() - last > self._times.lost_after_s:
                        lost.set()
                        busy.close()
                        with self._hub.lock:
                            self.wake()
        finally:
            channel.close()
