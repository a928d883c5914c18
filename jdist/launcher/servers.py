"""When the servers of a parameter server are started again: each alone, later each time. Pure but for what it remembers."""

from __future__ import annotations

from collections.abc import Sequence

from jdist.cluster.exit_status import FINISHED
from jdist.launcher.exit_cause import End, Task, how, mendable
from jdist.launcher.supervisor import QUICK_S, backoff_s

PS = "ps"


class Restarts:
    """Which servers run, and when those that have ended are due again.

    Args:
        tasks: the servers.
        seed: of the backoff's jitter.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int):
        self.tasks, self._seed = tuple(tasks), seed
        self._started: dict[Task, float] = {}
        self._due: dict[Task, float] = dict.fromkeys(tasks, 0.0)
        self._quick = dict.fromkeys(tasks, 0)
        self._count = 0

    @property
    def next_at(self) -> float | None:
        """When the next one is due; None if all run, or need not."""
        return min(self._due.values(), default=None)

    def due(self, now: float) -> list[Task]:
        """Those to start now; they count as running then."""
        found = sorted(task for task, at in self._due.items() if at <= now)
        for task in found:
            del self._due[task]
            self._started[task] = now
        return found

    def attempt(self) -> None:
        """Another attempt of the job begins: whatever does not run is due."""
        self._due |= {task: 0.0 for task in self.tasks if task not in self._started}

    def ended(self, task: Task, code: int, now: float) -> str:
        """Takes note of an end; when, if at all, it is due again.

        Returns:
            What to tell the user; "" for a server that was told that the job is over.
        """
        quick = now - self._started.pop(task) < QUICK_S
        end = End(task=task, code=code, at=now)
        if code == FINISHED:
            return ""
        if not mendable(end):
            return f"{task} {how(end)}; starting it again would not help"
        self._count += 1
        self._quick[task] = self._quick[task] + 1 if quick else 1
        wait_s = backoff_s(self._quick[task], seed=self._seed, attempt=self._count)
        self._due[task] = now + wait_s
        return f"{task} {how(end)}; started again in {wait_s:.1f} s, the others go on"
