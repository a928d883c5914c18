"""A long run while workers and servers are killed, stopped and resumed at random; the count must be exact at the end.

It takes JDIST_SOAK_S seconds, 60 unless that is set; JDIST_SOAK_SEED says what happens.
"""

import os
import random
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import test_ps_faults as faults
from real_cluster import BOUND_S, Cluster

SOAK_S = float(os.environ.get("JDIST_SOAK_S", "60"))
SEED = int(os.environ.get("JDIST_SOAK_SEED", "0"))
MOST_UNDER_WAY = 2000


class Chaos:
    """What is done to the servers, one thing after the other.

    Args:
        cluster: the servers.
        seed: of what happens.
    """

    def __init__(self, cluster, seed):
        self._cluster, self._random, self._over = cluster, random.Random(seed), threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos")
        self.done, self.error = [], None

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join(BOUND_S)
        self._cluster.ready()

    def _run(self):
        try:
            while not self._over.wait(self._random.uniform(0, 3)):
                self._do()
        except BaseException as exc:
            self.error = exc
            raise

    def _do(self):
        chance, cluster = self._random, self._cluster
        who = chance.sample(sorted(cluster.processes), chance.choice([1, 1, 1, 2, 3]))
        what = chance.choice(["kill", "kill", "stop"])
        self.done.append((what, *who))
        if what == "kill":
            cluster.kill(*who)
            self._over.wait(chance.choice([0, 0, 2]))
            cluster.start(*who)
        else:
            for each in who:
                cluster.stop(*each)
            self._over.wait(chance.uniform(0.1, 3))
            for each in who:
                cluster.resume(*each)


@pytest.mark.soak
@pytest.mark.timeout(SOAK_S + 300)
@pytest.mark.parametrize(("mode", "workers"), [("async", 3), ("sync", 2)])
def test_the_count_is_exact_whatever_happens(tmp_path, mode, workers):
    cluster = Cluster(tmp_path, workers=workers, ps=2)
    end = time.monotonic() + SOAK_S / 2
    try:
        with faults.running(cluster.strategy(mode=mode)) as job, Chaos(cluster, SEED) as chaos:
            while time.monotonic() < end:
                assert chaos.error is None, chaos.error
                job.schedule(50)
                if len(job.totals) > MOST_UNDER_WAY:
                    job.totals[-MOST_UNDER_WAY].result(2 * BOUND_S)
            chaos.__exit__()
            job.coordinator.join(4 * BOUND_S)
            job.check()
            assert len(chaos.done) > SOAK_S / 60
            print(f"{len(job.totals):,} calls, {job.rollbacks} rollbacks, {len(chaos.done)} faults")
    finally:
        cluster.close()
