"""The newest snapshot of a job, and when the next is taken."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

from jdist.errors import JDistError, ShardLostError
from jdist.ps.coordinator.closures import Closures
from jdist.ps.coordinator.snapshot import ClusterSnapshot, Disputed, take_snapshot
from jdist.ps.protocol.scheduler import Dispatch
from jdist.ps.transport.interface import Header
from jdist.ps.transport.shard_client import Together
from jdist.ps.transport.threads import Threads

_LOG = logging.getLogger(__name__)
PAUSE_S = 0.01
DISPUTED_S = 10.0


class Hub(Protocol):
    """What snapshots need of the coordinator; see there."""

    lock: threading.Condition
    closed: threading.Event
    closures: Closures

    @property
    def dispatch(self) -> Dispatch: ...
    @property
    def is_a_shard_lost(self) -> bool: ...
    def wait_for_event(self, timeout_s: float | None = None) -> None: ...
    def raise_error(self) -> None: ...
    def routes(self) -> Header: ...


class Snapshots:
    """Takes snapshots while the job goes on, and has the newest.

    Attributes:
        newest: to which all shards go back when one of them loses its memory.
    """

    def __init__(self, shards: Together, hub: Hub, first: ClusterSnapshot, *, give_up_s: float):
        """None has been taken yet.

        Args:
            shards: the shards.
            hub: the coordinator.
            first: the state at the beginning.
            give_up_s: how long it may take until the shards agree on one.
        """
        self.newest, self._give_up_s = first, give_up_s
        self._shards, self._hub = shards, hub
        self._taking, self._number = threading.Lock(), 0
        self._is_due = False
        # A thread of its own: a snapshot waits until lost workers' closures are sorted out, which other threads do.
        self._threads = Threads(1, "jdist-snapshot")

    def take(self) -> ClusterSnapshot:
        """The state of all shards as it is now; it is the newest from now on.

        Raises:
            ShardLostError: a shard does not answer.
        """
        hub, end = self._hub, time.monotonic() + self._give_up_s
        while True:
            routes = hub.routes()
            try:
                with self._taking:  # two at a time would thaw each other's shards
                    found = self._try()
            except ShardLostError:
                if hub.routes() == routes:
                    raise
                found = None  # the leader that had it was lost; another has the state
            if found is not None:
                return found
            with hub.lock:
                hub.raise_error()
                if hub.closed.is_set():
                    raise ShardLostError("the coordinator was closed")
                if time.monotonic() > end:
                    raise ShardLostError(f"the parameter servers gave no snapshot within {self._give_up_s:g} s")
                hub.lock.wait(PAUSE_S)  # they begin a new history, or a lost worker is being sorted out

    def due(self) -> None:
        """Has one taken, for which nobody waits; called with the hub's lock held."""
        if not self._is_due:
            self._is_due = True
            self._threads.submit(self._take_quietly)

    def close(self) -> None:
        """Takes no further ones."""
        self._threads.close()

    def join(self, timeout_s: float) -> None:
        """Waits for the end of its thread, once the hub is closed."""
        self._threads.join(timeout_s)

    def _take_quietly(self) -> None:
        """What is wrong with a shard is its watch's affair."""
        with self._hub.lock:
            self._is_due = False
        try:
            self.take()
        except JDistError as exc:
            _LOG.info("no snapshot: %s", exc)

    def _try(self) -> ClusterSnapshot | None:
        """A snapshot, unless the shards begin a new history meanwhile, or disagree; then it waits until they may agree."""
        hub = self._hub
        with hub.lock:
            self._number += 1
            number, generation, settled = self._number, hub.dispatch.generation, hub.dispatch.settled
        found = take_snapshot(
            self._shards,
            number=number,
            generation=generation,
            settled=settled,
            is_wanted=lambda: hub.dispatch.generation == generation and not hub.closed.is_set(),
        )
        with hub.lock:
            if isinstance(found, Disputed):
                end = time.monotonic() + DISPUTED_S
                while self._is_with_a_worker(found, generation) and time.monotonic() < end:
                    hub.wait_for_event(DISPUTED_S)
                return None
            # Of a closure that is in it nobody could get the result any more, were it not here before a rollback.
            while found is not None and not self._are_reported(found, generation):
                hub.wait_for_event()
            if found is None or hub.dispatch.generation != generation or hub.is_a_shard_lost:
                return None
            self.newest = found
            if hub.closures.are_in(found):
                self.due()
            hub.lock.notify_all()
            return found

    def _is_with_a_worker(self, found: Disputed, generation: int) -> bool:
        """Whether a worker has yet to say what became of what the shards disagree on: to hold them again would be in vain."""
        hub, known = self._hub, self._hub.dispatch
        held = any(found.closures.intersection(worker.closures) for worker in known.workers.values())
        return held and not hub.closed.is_set() and known.generation == generation and not hub.is_a_shard_lost

    def _are_reported(self, found: ClusterSnapshot, generation: int) -> bool:
        """Whether all closures of a snapshot have been reported, or it is of no use any more."""
        hub, known = self._hub, self._hub.dispatch
        done = all(c < known.settled or c in known.done for c in found.applied)
        return done or hub.closed.is_set() or known.generation != generation or hub.is_a_shard_lost
