"""The newest snapshot of a job, and when the next is taken."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from jdist.errors import JDistError, ShardLostError
from jdist.ps.coordinator.engine import Engine
from jdist.ps.coordinator.snapshot import ClusterSnapshot, Disputed, take_snapshot
from jdist.ps.transport.interface import Header
from jdist.ps.transport.shard_client import Together
from jdist.ps.transport.threads import Threads

_LOG = logging.getLogger(__name__)
PAUSE_S = 0.01
DISPUTED_S = 10.0


class Snapshots:
    """Takes snapshots while the job goes on; the engine has the newest.

    Args:
        shards: the shards.
        engine: what is scheduled.
        routes: says where the leader of each shard is.
        give_up_s: how long it may take until the shards agree on one.
    """

    def __init__(self, shards: Together, engine: Engine, routes: Callable[[], Header], *, give_up_s: float):
        self._shards, self._engine, self._routes, self._give_up_s = shards, engine, routes, give_up_s
        self._taking, self._number = threading.Lock(), 0
        self._is_due = False
        # A thread of its own: a snapshot waits until lost workers' closures are sorted out, which other threads do.
        self._threads = Threads(1, "jdist-snapshot")

    def take(self) -> ClusterSnapshot:
        """The state of all shards as it is now; it is the newest from now on.

        Raises:
            ShardLostError: a shard does not answer.
        """
        engine, end = self._engine, time.monotonic() + self._give_up_s
        while True:
            routes = self._routes()
            try:
                with self._taking:  # two at a time would thaw each other's shards
                    found = self._try()
            except ShardLostError:
                if self._routes() == routes:
                    raise
                found = None  # the leader that had it was lost; another has the state
            if found is not None:
                return found
            with engine.lock:
                engine.raise_error()
                if engine.closed.is_set():
                    raise ShardLostError("the coordinator was closed")
                if time.monotonic() > end:
                    raise ShardLostError(f"the parameter servers gave no snapshot within {self._give_up_s:g} s")
                engine.lock.wait(PAUSE_S)  # they begin a new history, or a lost worker is being sorted out

    def due(self) -> None:
        """Has one taken, for which nobody waits; called with the engine's lock held."""
        if not self._is_due:
            self._is_due = True
            self._threads.submit(self._take_quietly)

    def close(self) -> None:
        """Takes no further ones."""
        self._threads.close()

    def join(self, timeout_s: float) -> None:
        """Waits for the end of its thread, once the engine is closed."""
        self._threads.join(timeout_s)

    def _take_quietly(self) -> None:
        """What is wrong with a shard is its watch's affair."""
        with self._engine.lock:
            self._is_due = False
        try:
            self.take()
        except JDistError as exc:
            _LOG.info("no snapshot: %s", exc)

    def _try(self) -> ClusterSnapshot | None:
        """A snapshot, unless the shards begin a new history meanwhile, or disagree; then it waits until they may agree."""
        engine = self._engine
        with engine.lock:
            self._number += 1
            number, generation, settled = self._number, engine.dispatch.generation, engine.dispatch.settled
        found = take_snapshot(
            self._shards,
            number=number,
            generation=generation,
            settled=settled,
            is_wanted=lambda: engine.dispatch.generation == generation and not engine.closed.is_set(),
        )
        with engine.lock:
            if isinstance(found, Disputed):
                end = time.monotonic() + DISPUTED_S
                while self._is_with_a_worker(found, generation) and time.monotonic() < end:
                    engine.wait_for_event(DISPUTED_S)
                return None
            # Of a closure that is in it nobody could get the result any more, were it not here before a rollback.
            while found is not None and not self._are_reported(found, generation):
                engine.wait_for_event()
            if found is None or engine.dispatch.generation != generation or engine.is_a_shard_lost:
                return None
            engine.newest = found
            if engine.closures.are_in(found):
                self.due()
            engine.lock.notify_all()
            return found

    def _is_with_a_worker(self, found: Disputed, generation: int) -> bool:
        """Whether a worker has yet to say what became of what the shards disagree on: to hold them again would be in vain."""
        engine, known = self._engine, self._engine.dispatch
        held = any(found.closures.intersection(worker.closures) for worker in known.workers.values())
        return held and not engine.closed.is_set() and known.generation == generation and not engine.is_a_shard_lost

    def _are_reported(self, found: ClusterSnapshot, generation: int) -> bool:
        """Whether all closures of a snapshot have been reported, or it is of no use any more."""
        engine, known = self._engine, self._engine.dispatch
        done = all(c < known.settled or c in known.done for c in found.applied)
        return done or engine.closed.is_set() or known.generation != generation or engine.is_a_shard_lost
