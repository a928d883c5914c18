"""When a process is started again: the waits, and `Restarts` of a parameter server's servers, one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence

from jdist.cluster.exit_status import FINISHED
from jdist.launcher.exit_cause import QUICK_S, End, Task, describe, restart_may_help

LONGEST_BACKOFF_S = 60.0


def backoff_s(quick: int, *, seed: int, attempt: int) -> float:
    """Computes the wait in seconds after `quick` attempts in a row that failed early."""
    # They are 1, 2, 4 ... 60, each less a random part of up to a half, so that launchers that
    # failed together, each with its own `seed`, do not restart together.
    longest = min(LONGEST_BACKOFF_S, 2.0 ** min(max(quick - 1, 0), 10))
    return longest * random.Random(f"{seed} {attempt}").uniform(0.5, 1.0)


class Restarts:
    """The servers of a parameter server; each is restarted alone, later each time."""

    def __init__(self, tasks: Sequence[Task], *, seed: int):
        self.tasks, self._seed = tuple(tasks), seed
        self._started: dict[Task, float] = {}
        self._due: dict[Task, float] = dict.fromkeys(tasks, 0.0)
        self._quick = dict.fromkeys(tasks, 0)
        self._count = 0

    @property
    def next_at(self) -> float | None:
        """Returns the time when the next server is due, or None."""
        return min(self._due.values(), default=None)

    def due(self, now: float) -> list[Task]:
        """Returns the servers to start now, which then count as running."""
        tasks = sorted(task for task, at in self._due.items() if at <= now)
        for task in tasks:
            del self._due[task]
            self._started[task] = now
        return tasks

    def attempt(self) -> None:
        """Makes all servers due that do not run, as another attempt of the job begins."""
        self._due |= {task: 0.0 for task in self.tasks if task not in self._started}

    def ended(self, task: Task, code: int, now: float) -> str:
        """Handles a server's end: schedules a restart if that may help; returns a line to print."""
        # The line is "" if the coordinator has ended the server.
        quick = now - self._started.pop(task) < QUICK_S
        end = End(task=task, code=code, at=now)
        if code == FINISHED:
            return ""
        if not restart_may_help(end):
            return f"{task} {describe(end)}; starting it again would not help"
        self._count += 1
        self._quick[task] = self._quick[task] + 1 if quick else 1
        wait_s = backoff_s(self._quick[task], seed=self._seed, attempt=self._count)
        self._due[task] = now + wait_s
        return f"{task} {describe(end)}; started again in {wait_s:.1f} s, the others go on"
