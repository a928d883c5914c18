"""Jobs over lines that lose, double, delay and reorder, while workers and servers die: what has happened is then checked.

JDIST_SOAK_S makes it look for longer.
"""

import os
import random

import pytest

import jdist
from jdist.errors import BatchError
from tests.ps import counting
from tests.ps.flaky import InProcess, Network

SOAK_SEEDS = int(os.environ.get("JDIST_SOAK_S", "60")) // 12
RATES = {"lose_the_call": 0.03, "lose_the_answer": 0.03, "twice": 0.03, "delayed": 0.1, "again_late": 0.1}


def trains(seed, *, mode, ps, calls, faults):
    """Trains while faults happen, and checks the history."""
    chance, network = random.Random(seed), Network(seed, **RATES)
    made = InProcess(network, ps=ps, mode=mode)
    step = jdist.distribute(counting.step, made.strategy)
    state = made.strategy.init(counting.create)
    try:
        metrics = []
        at = sorted(chance.sample(range(1, calls), faults))
        for i in range(calls):
            state, found = step(state, counting.batch(i))
            metrics.append(found["total"])
            if i in at:
                metrics[chance.randrange(i)].result(60)
                happens(made, state, chance)
        made.strategy.check(state)
        for each in metrics:
            each.result(10)  # it is there, or never will be
        network.end()
        counting.check(state, range(calls), shards=ps)
        closures = state.job.coordinator.queue.dispatch.scheduled
        assert closures == calls * (2 if mode == "sync" else 1)
        if mode == "async":
            made.history.check(ps, closures)
    finally:
        state.job.close()


def happens(made, state, chance):
    what = chance.choice(["restart", "cut worker", "cut ps", "forget", "snapshot", "two at once"])
    worker, ps = chance.randrange(2), chance.randrange(len(state.job.servers.ps))
    match what:
        case "restart":
            made.restart(worker)
        case "cut worker":  # for longer than it takes to count as lost
            with made.network.cut(f"worker{worker}", 0.5):
                pass
        case "cut ps":
            with made.network.cut(f"ps{ps}", 0.3):
                pass
        case "forget":
            made.forget(ps)
        case "snapshot":
            state.job.coordinator.snapshots.take()
        case "two at once":
            made.restart(worker)
            made.forget(ps)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("ps", [2, 1])
def test_each_closure_takes_effect_on_every_shard_once(seed, ps):
    trains(seed, mode="async", ps=ps, calls=60, faults=4)


def test_synchronous_updates_too():
    trains(0, mode="sync", ps=2, calls=30, faults=3)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1000, 1000 + SOAK_SEEDS))
def test_in_many_histories(seed):
    trains(seed, mode="async", ps=1 + seed % 3, calls=100, faults=8)
    trains(seed, mode="sync", ps=1 + seed % 3, calls=40, faults=4)


def test_a_batch_that_cannot_be_cut_for_the_workers_is_refused():
    made = InProcess(Network(0), workers=3, mode="sync")
    step, state = jdist.distribute(counting.step, made.strategy), made.strategy.init(counting.create)
    with pytest.raises(BatchError, match=r"2 rows does not divide by 3 \(3 workers"):
        step(state, counting.batch(0))
    state.job.close()
