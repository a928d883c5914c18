"""Random schedules of faults while a job runs: nothing is lost, doubled or mixed, and nothing hangs.

Each schedule kills, stops and starves of file descriptors any of the servers, and cuts the links of any pair, the
coordinator's too. JDIST_SOAK_SCHEDULES says how many there are, 10 unless that is set; JDIST_SOAK_SEED says what happens.
"""

import collections
import contextlib
import os
import random
import resource
import threading
import time

import pytest

from tests.ps import test_faults as faults
from tests.ps.netns import COORDINATOR, spread
from tests.ps.real_cluster import BOUND_S

SCHEDULES = int(os.environ.get("JDIST_SOAK_SCHEDULES", "10"))
SEED = int(os.environ.get("JDIST_SOAK_SEED", "0"))
WORKERS = PS = 2
CALLS = 40  # between two faults
LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)  # the servers', too


class Schedule:
    """Faults that overlap, each for some seconds, one after the other begun.

    Args:
        cluster: the servers.
        chance: what happens.
    """

    def __init__(self, cluster, chance):
        self._cluster, self._chance = cluster, chance
        self._undo, self.done = [], []

    def next(self):
        """Does the next thing, and undoes what has lasted long enough."""
        now = time.monotonic()
        for end, undo in [entry for entry in self._undo if entry[0] < now]:
            self._undo.remove((end, undo))
            undo()
        what = self._chance.choice([self._kill, self._kill, self._stop, self._cut, self._cut, self._starve])
        name, undo = what()
        self.done.append(name)
        if undo is not None:
            self._undo.append((time.monotonic() + self._chance.uniform(0.2, 12.0), undo))

    def close(self):
        """Mends all."""
        for _, undo in self._undo:
            undo()
        self._undo.clear()
        self._cluster.ready()

    def _one(self):
        return self._chance.choice(sorted(self._cluster.processes))

    def _kill(self):
        who = self._one()
        self._cluster.kill(who)
        if self._chance.random() < 0.5:
            self._cluster.start(who)
            return f"killed {who}", None
        return f"killed {who} for a while", lambda: self._cluster.start(who)

    def _stop(self):
        who = self._one()
        process = self._cluster.processes[who]
        if process.poll() is not None:
            return f"left {who} dead", None
        self._cluster.stop(*who)

        def resume():
            if process.poll() is None and self._cluster.processes[who] is process:
                self._cluster.resume(*who)

        return f"stopped {who}", resume

    def _cut(self):
        pair = self._chance.sample([COORDINATOR, *sorted(self._cluster.processes)], 2)
        self._cluster.cut(*pair)
        return f"cut {pair}", lambda: self._cluster.mend(*pair)

    def _starve(self):
        """No file more than it has open now."""
        who = self._one()
        process = self._cluster.processes[who]
        with contextlib.suppress(OSError):  # it is dead
            open_now = len(os.listdir(f"/proc/{process.pid}/fd"))
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (open_now, LIMITS[1]))

            def undo():
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, LIMITS)

            return f"starved {who}", undo
        return f"left {who} dead", None


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with spread(tmp_path_factory.mktemp("soak"), workers=WORKERS, ps=PS) as made:
        yield made


@pytest.mark.soak
@pytest.mark.timeout(60 * SCHEDULES + 300)
def test_nothing_is_lost_doubled_or_mixed_and_nothing_hangs(cluster):
    counts = collections.Counter()
    for number in range(SCHEDULES):
        chance = random.Random(f"{SEED} {number}")
        options = {"mode": chance.choice(["async", "sync"]), "ps_replicas": chance.choice([1, 2])}
        cluster.ready()
        schedule = Schedule(cluster, chance)
        begun = time.monotonic()
        try:
            with faults.running(cluster.strategy(**options)) as job:
                try:
                    for _ in range(chance.randint(1, 6)):
                        job.schedule(CALLS)
                        schedule.next()
                        threading.Event().wait(chance.uniform(0.0, 3.0))
                finally:
                    schedule.close()
                job.coordinator.queue.join(2 * BOUND_S)  # longer than any of its waits: else it hangs
                job.check()
                counts["calls"] += len(job.totals)
                counts["rollbacks"] += job.rollbacks
        except BaseException as exc:
            exc.add_note(f"schedule {number} of seed {SEED}, {options}: {schedule.done}")
            raise
        counts["faults"] += len(schedule.done)
        counts["schedules"] += 1
        print(f"{number}: {options}, {time.monotonic() - begun:.0f} s: {'; '.join(schedule.done)}", flush=True)
    print(dict(counts))
