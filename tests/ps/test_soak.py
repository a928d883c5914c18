"""Random schedules of faults while a job runs: nothing is lost, doubled or mixed, and nothing hangs.

The first test kills servers, stops them, starves them of file descriptors and cuts links. The second cuts links at each
moment of a snapshot, one way or both ways, and sets the servers' wall clocks. JDIST_SOAK_SCHEDULES is the number of schedules
of each test (default 10). JDIST_SOAK_SEED chooses the faults.
"""

import collections
import contextlib
import dataclasses
import os
import random
import resource
import shutil
import threading
import time

import pytest

from jdist.ps.protocol.messages import Snapshot
from jdist.ps.transport.shard_client import ShardClient
from tests.ps import test_faults as faults
from tests.ps.netns import COORDINATOR, spread
from tests.ps.real_cluster import BOUND_S, TIMES
from tests.settable_clock import settable_clock

SCHEDULES = int(os.environ.get("JDIST_SOAK_SCHEDULES", "10"))
SEED = int(os.environ.get("JDIST_SOAK_SEED", "0"))
WORKERS = PS = 2
CALLS = 40  # between two faults
LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)  # the servers', too


class Schedule:
    """Faults that overlap, each for some seconds, one after the other begun."""

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


STANDSTILL_S = 10.0  # after the last mend
LONGEST_CUT_S = 30.0


class CutsRoundASnapshot:
    """Cuts that begin at one moment of the job's next snapshot; which links, which way and when is chance."""

    def __init__(self, cluster, job, chance):
        self._cluster, self._job = cluster, job
        self.begun, self._lock = threading.Event(), threading.Lock()
        servers, workers = ([who for who in sorted(cluster.processes) if who[0] == role] for role in ("ps", "worker"))
        one, worker = chance.choice(servers), chance.choice(workers)
        links = chance.choice(
            [
                [(COORDINATOR, one)],
                [(COORDINATOR, each) for each in servers],
                [(worker, one)],
                [(worker, each) for each in servers],
                [(COORDINATOR, one), (worker, one)],
                [tuple(servers)],
            ]
        )
        self._cuts = [(chance.sample(link, 2), chance.random() < 0.5) for link in links]
        self._phase, self._is_after = chance.choice(["freeze", "keep", "thaw"]), chance.random() < 0.5
        moment = f"{'after' if self._is_after else 'before'} the {self._phase}"
        ways = [f"{one} {'to and from' if back else 'to'} {to}" for (one, to), back in self._cuts]
        self.name = f"{moment}: {', '.join(ways)}"

    def begin(self):
        """Makes the cuts once a snapshot has come that far."""
        self._say, ShardClient.say = ShardClient.say, self._cutting(ShardClient.say)
        with self._job.coordinator.queue.lock:
            self._job.coordinator.snapshots.due()
        assert self.begun.wait(BOUND_S)

    def mend(self):
        ShardClient.say = self._say
        for (one, to), _ in self._cuts:
            self._cluster.mend(one, to)

    def _cutting(self, say):
        def cutting(client, messages, *arguments):
            is_it = any(isinstance(message, Snapshot) and message.phase == self._phase for message in messages)
            if is_it and not self._is_after:
                self._cut()
            answer = say(client, messages, *arguments)
            if is_it and self._is_after:
                self._cut()
            return answer

        return cutting

    def _cut(self):
        with self._lock:
            if self.begun.is_set():
                return
            for (one, to), back in self._cuts:
                self._cluster.cut(one, to, back=back)
            self.begun.set()


def longest_standstill_s(queue, since):
    """Waits until every closure is done; returns for how long none finished at most."""
    longest, newest = 0.0, since
    while not queue.done:
        queue.raise_error()
        newest = max(newest, queue.finished_at_s)
        longest = max(longest, time.monotonic() - newest)
        assert longest < 2 * BOUND_S, "it hangs"
        time.sleep(0.01)
    return longest


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.timeout(60 * SCHEDULES + 300)
@pytest.mark.parametrize("set_by_s", [-3600, 3600])
def test_a_link_cut_round_a_snapshot_lets_nobody_stand_still_once_it_is_mended(tmp_path, set_by_s):
    variables, is_set = settable_clock(tmp_path, set_by_s)
    standstills, late = [], []
    with spread(tmp_path, workers=WORKERS, ps=PS, variables=variables) as cluster:
        for number in range(SCHEDULES // 2):
            chance = random.Random(f"{SEED} {set_by_s} {number}")
            options = {"mode": chance.choice(["async", "sync"]), "ps_replicas": chance.choice([1, 2])}
            times = dataclasses.replace(TIMES, lost_after_s=chance.choice([1.0, 10.0]), ps_timeout_s=120.0)
            with faults.running(cluster.strategy(times=times, **options)) as job:
                job.schedule(10 * CALLS)
                cuts = CutsRoundASnapshot(cluster, job, chance)
                lasts_s = chance.choice([1.0, LONGEST_CUT_S]) * chance.random()
                try:
                    cuts.begin()
                    if chance.random() < 0.3:
                        is_set.touch()
                    threading.Event().wait(lasts_s)
                finally:
                    cuts.mend()
                mended_at_s = time.monotonic()
                job.schedule(CALLS)
                standstill_s = longest_standstill_s(job.coordinator.queue, mended_at_s)
                before_s = time.monotonic()
                job.check()
                standstills.append(max(standstill_s, time.monotonic() - before_s))
                is_set.unlink(missing_ok=True)
                told = f"{number}: {options}, {cuts.name} for {lasts_s:.1f} s: stood still {standstill_s:.1f} s"
                told += f", {job.rollbacks} rollbacks, fetched in {time.monotonic() - before_s:.1f} s"
                print(told, flush=True)
            if standstills[-1] > STANDSTILL_S:
                late.append(told)
    print(f"{len(standstills)} schedules, the longest standstill {max(standstills):.1f} s", flush=True)
    assert not late, "\n".join(late)
