"""Which workers a job can count on: those that are lost too often are not used any more, and without any the job fails."""

from __future__ import annotations

import time
from collections.abc import Iterable

from jdist.errors import NoWorkersError
from jdist.ps.dispatched import Worker


class Attendance:
    """Takes note of which workers are there.

    Args:
        num_workers: how many there are.
        no_worker_timeout_s: without any worker, after which the job fails.
    """

    def __init__(self, num_workers: int, no_worker_timeout_s: float):
        self._num_workers, self._timeout_s = num_workers, no_worker_timeout_s
        self._quarantined: dict[int, str] = {}
        self._seen_at = time.monotonic()

    def quarantine(self, worker: int, why: str) -> None:
        """A worker is not used any more."""
        self._quarantined[worker] = why

    def none_left(self) -> NoWorkersError | None:
        """What to raise if no worker is used any more."""
        if len(self._quarantined) < self._num_workers:
            return None
        return NoWorkersError(f"no worker is left: {'; '.join(self._quarantined.values())}")

    def missing(self, workers: Iterable[Worker], *, is_idle: bool) -> NoWorkersError | None:
        """What to raise if there is work, and no worker has been there for long.

        Args:
            workers: what is known of them.
            is_idle: whether nobody waits for any.
        """
        now = time.monotonic()
        if is_idle or any(known.state == "ready" for known in workers):
            self._seen_at = now
        silent_s = now - self._seen_at
        if silent_s <= self._timeout_s:
            return None
        return NoWorkersError(
            f"no worker has been there for {silent_s:.0f} s. What the servers have is whole: fetch the state and save it, or "
            "start workers and go on."
        )
