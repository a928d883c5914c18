"""Whether there is a worker for what is scheduled, and whether any of it gets done."""

from __future__ import annotations

import logging
import time

from jdist.errors import NoWorkersError
from jdist.ps.protocol.scheduler import Dispatch
from jdist.ps.protocol.times import Times

_LOG = logging.getLogger(__name__)


class Attendance:
    """Notes which workers are there, and when a closure last finished.

    Called with the coordinator's lock held.

    Args:
        num_workers: how many workers there are.
        times: without any worker for how long the job fails, and without a finished closure the user is told.

    Attributes:
        addresses: of each worker that was reached for, by number.
    """

    def __init__(self, num_workers: int, times: Times):
        self.addresses: dict[int, str] = {}
        self._num_workers, self._times = num_workers, times
        self._quarantined: dict[int, str] = {}
        self._seen_at_s = self._finished_at_s = time.monotonic()
        self._has_warned = False

    def quarantine(self, worker: int, why: str) -> None:
        """Excludes a worker for the rest of the job."""
        self._quarantined[worker] = why

    def finished(self) -> None:
        """Notes that a closure has finished."""
        self._finished_at_s, self._has_warned = time.monotonic(), False

    def none_left(self) -> NoWorkersError | None:
        """Returns what to raise if every worker is excluded."""
        if len(self._quarantined) < self._num_workers:
            return None
        return NoWorkersError(f"no worker is left: {'; '.join(self._quarantined.values())}")

    def missing(self, dispatch: Dispatch, *, is_idle: bool) -> NoWorkersError | None:
        """Returns what to raise if there is work, and no worker has been there for long.

        Args:
            dispatch: the scheduler's state.
            is_idle: whether nobody waits for any worker.
        """
        now_s = time.monotonic()
        if is_idle or any(known.state == "ready" for known in dispatch.workers.values()):
            self._seen_at_s = now_s
        silent_s = now_s - self._seen_at_s
        if silent_s <= self._times.no_worker_timeout_s:
            return None
        return NoWorkersError(
            f"no worker has been there for {silent_s:.0f} s. What the servers have is whole: fetch the state and save it, or "
            "start workers and go on."
        )

    def warn_of_standstill(self, dispatch: Dispatch, *, is_idle: bool) -> None:
        """Says once for whom all wait if no closure has finished for long; arguments as for `missing`."""
        now_s = time.monotonic()
        if is_idle:
            self._finished_at_s = now_s
        if self._has_warned or now_s - self._finished_at_s < self._times.standstill_s:
            return
        self._has_warned = True
        waits = [f"parameter server {shard} to take the state" for shard in sorted(dispatch.restoring)]
        waits += [
            f"worker {w} at {self.addresses.get(w, 'an address not tried yet')}, "
            f"{'which has' if each.state == 'ready' else 'which was lost with'} {len(each.closures)} closures, the first of "
            f"them {min(each.closures)}"
            for w, each in sorted(dispatch.workers.items())
            if each.closures
        ]
        _LOG.warning(
            "no closure has finished for %.0f s; waiting for %s",
            now_s - self._finished_at_s,
            "; ".join(waits) or "a worker to come",
        )
