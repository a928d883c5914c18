"""Snapshots of all shards: consistent cuts, each closure in them on every shard or on none; and when they are taken."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from jdist.errors import JDistError, ShardLostError
from jdist.ps.coordinator.closure_queue import ClosureQueue
from jdist.ps.coordinator.closures import ClusterSnapshot
from jdist.ps.protocol.messages import Cut, Message, Snapshot
from jdist.ps.transport.interface import CallFailed
from jdist.ps.transport.shard_client import ShardClient, ShardClients
from jdist.ps.transport.threads import Threads

_LOG = logging.getLogger(__name__)
PAUSE_S = 0.01
DISPUTED_S = 10.0
ANSWER_S = 3.0  # less than a shard stays frozen (`ShardServer`)


class Snapshots:
    """Takes snapshots while the job goes on."""

    def __init__(self, queue: ClosureQueue, threads: Threads):
        self._queue, self._give_up_s = queue, 2 * queue.times.ps_timeout_s
        # A thread of its own takes due snapshots: a snapshot waits until lost workers' closures are
        # sorted out, which other threads do.
        self._threads = threads
        self._taking, self._number = threading.Lock(), 0
        self._is_due = False

    def take(self) -> ClusterSnapshot:
        """Takes a snapshot of all shards now; it becomes the newest."""
        queue, begun_s, failed = self._queue, time.monotonic(), None
        while True:
            routes = queue.routes()
            try:
                with self._taking:  # two at a time would thaw each other's shards
                    snapshot = self._try()
            except ShardLostError as exc:
                cause = exc.__cause__
                if (not isinstance(cause, CallFailed) or cause.is_final) and queue.routes() == routes:
                    raise
                if failed is None:
                    _LOG.warning("no snapshot for now: %s. The other shards go on, and jdist tries again.", exc)
                snapshot, failed = None, exc
            if snapshot is not None:
                return snapshot
            with queue.lock:
                queue.raise_error()
                if queue.closed.is_set():
                    raise ShardLostError("the coordinator was closed")
                if time.monotonic() > begun_s + self._give_up_s:
                    why = "" if failed is None else f": {failed}"
                    raise ShardLostError(f"the parameter servers gave no snapshot within {self._give_up_s:g} s{why}")
                queue.lock.wait(PAUSE_S)  # they begin a new history, or a lost worker is being sorted out

    def due(self) -> None:
        """Has a snapshot taken, for which nobody waits; called with the queue's lock held."""
        if not self._is_due:
            self._is_due = True
            self._threads.submit(self._take_quietly)

    def _take_quietly(self) -> None:
        """Takes one; what is wrong with a shard is its watch's affair."""
        with self._queue.lock:
            self._is_due = False
        try:
            self.take()
        except JDistError as exc:
            _LOG.info("no snapshot: %s", exc)

    def _try(self) -> ClusterSnapshot | None:
        """Takes one, unless the shards begin a new history meanwhile, or disagree; then it waits until they may agree."""
        queue = self._queue
        with queue.lock:
            self._number += 1
            number, generation, settled = self._number, queue.generation, queue.dispatch.settled

        def is_wanted() -> bool:
            return queue.generation == generation and not queue.closed.is_set()

        snapshot, disputed = take_snapshot(
            queue.shards, number=number, generation=generation, settled=settled, is_wanted=is_wanted
        )

        def is_with_a_worker() -> bool:
            """Returns whether a try must wait until that worker has told the fate of closures that the shards disagree on."""
            return any(disputed.intersection(worker.closures) for worker in queue.dispatch.workers.values())

        def are_reported() -> bool:
            known = queue.dispatch
            return snapshot is None or all(c < known.settled or c in known.done for c in snapshot.applied)

        with queue.lock:
            end = time.monotonic() + DISPUTED_S
            while is_with_a_worker() and is_wanted() and not queue.lost and time.monotonic() < end:
                queue.wait_for_event(DISPUTED_S)
            # After a rollback nobody computes again what is in it: its results must be here before.
            while not are_reported() and is_wanted() and not queue.lost:
                queue.wait_for_event()
            if snapshot is None or queue.generation != generation or queue.lost:
                return None
            queue.newest = snapshot
            if queue.closures.forget(snapshot):
                self.due()
            queue.lock.notify_all()
            return snapshot


def take_snapshot(
    shards: ShardClients,
    *,
    number: int,
    generation: int,
    settled: int,
    is_wanted: Callable[[], bool],
    timeout_s: float = 2.0,
) -> tuple[ClusterSnapshot | None, frozenset[int]]:
    """Takes a snapshot while the job goes on; returns `(snapshot or None, disputed closures)`."""
    # All shards are frozen: closures staged on all of them are still committed, no others are
    # admitted. Once they report the same applied closures, their arrays are a consistent cut. The
    # cut refers to the arrays without a copy; the shards thaw before it is read. No snapshot: the
    # shards began another history, the cut was gone before it was read, or they did not agree in
    # time. `disputed` closures are then applied on some shards only.
    sender: dict[str, Any] = {"generation": generation}
    end, cuts, disputed = time.monotonic() + timeout_s, [], frozenset[int]()

    def ask(*messages: Message) -> list[Any]:
        def one(number: int, client: ShardClient) -> Any:
            try:
                return client.within(ANSWER_S).say(messages)[0]
            except ShardLostError as exc:
                why = f"{exc}, for {ANSWER_S:g} s, as shard {number} is asked for its part"
                raise ShardLostError(why) from exc.__cause__

        return shards.each(one)

    ask()  # so that none is frozen while another does not answer
    try:
        ask(Snapshot(**sender, number=number, phase="freeze"))
        # A rollback makes the snapshot void. Shards disagree in the middle of a commit.
        while is_wanted() and time.monotonic() < end:
            answers = [answer for (answer,) in ask(Snapshot(**sender, number=number, phase="keep"))]
            if not all(isinstance(answer, Cut) for answer in answers):
                return None, frozenset()
            # They may have heard of more meanwhile, and forgotten it.
            settled = max(settled, *(a.settled for a in answers))
            cuts = [(frozenset(c for c in a.applied if c >= settled), a.version) for a in answers]
            if len(set(cuts)) == 1:
                break
            sets, cuts = [applied for applied, _ in cuts], []
            disputed = frozenset.union(*sets) - frozenset.intersection(*sets)
            time.sleep(0.01)
    finally:
        ask(Snapshot(**sender, number=number, phase="thaw"))
    if not cuts:
        return None, disputed
    applied, version = cuts[0]
    read = shards.each(lambda i, client: client.read(generation, version))
    kept = [arrays for arrays in read if arrays is not None]
    if len(kept) < len(read):
        return None, frozenset()
    return ClusterSnapshot(settled=settled, applied=applied, version=version, kept=kept), frozenset()
