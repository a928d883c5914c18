"""`ps_replicas=2` with real processes and real signals: what is killed or stopped costs no update."""

import contextlib
import os
import signal

import numpy as np
import optax
import pytest

import jdist
import jdist.ps
from jdist.strategies.parameter_server import parameter_server
from tests.ps.hidden_layer import create, train_step
from tests.ps.real_cluster import wait_until
from tests.ps.test_processes import ROWS

WAIT_S = 60.0
TIMES = jdist.ps.Times(ping_s=0.375, lost_after_s=1.5, max_losses=10_000)


class Run:
    """Two workers and two servers with a backup of each shard; counts what it has scheduled."""

    def __init__(self):
        self.strategy = parameter_server(
            local_workers=2, local_ps=2, ps_replicas=2, times=TIMES, partitioner=jdist.ps.fixed_shards(2)
        )
        self.step = jdist.distribute(train_step, self.strategy)
        self.state = self.strategy.init(lambda: create(optax.sgd(0.05, 0.9)))
        source = jdist.data.from_arrays(ROWS, global_batch=8, epochs=100)
        self.batches = iter(self.strategy.distribute_dataset(source))
        self.losses = []

    @property
    def coordinator(self):
        return self.state.job.coordinator

    def steps(self, count, *, wait=True):
        """Schedules steps; waits for the last."""
        for _ in range(count):
            self.state, metrics = self.step(self.state, next(self.batches))
            self.losses.append(metrics["loss"])
        if wait:
            self.losses[-1].result(WAIT_S)

    def signal(self, number, which):
        os.kill(self.pid(number), which)

    def pid(self, number):
        return self.state.job.servers.processes()[number]

    def until(self, is_so):
        """Waits until something is so of both shards' copies."""
        for watch in self.coordinator._watches:
            wait_until(lambda watch=watch: is_so(watch._leadership), WAIT_S)

    def until_in_step(self):
        self.until(
            lambda replicas: replicas.confirmed and None not in replicas.holds and replicas.holds == replicas.alive
        )

    def check(self):
        """Each closure has counted once."""
        found = self.strategy.fetch(self.state)
        assert int(found.step) == len(self.losses)
        assert np.isfinite([float(x) for x in self.losses]).all()


@pytest.fixture
def run():
    with contextlib.ExitStack() as ends:
        run = Run()
        ends.callback(lambda: run.state.job.close())
        run.steps(20)
        run.until_in_step()
        yield run


def test_a_server_killed_and_then_the_other_cost_no_update(run):
    before = run.pid(0)
    run.steps(200, wait=False)
    run.signal(0, signal.SIGKILL)
    run.steps(200)
    run.until_in_step()  # it came back, and is the backup
    run.check()
    assert run.coordinator.queue.generation == 1
    assert [watch._leadership.leader for watch in run.coordinator._watches] == [1, 0]  # both on the second server
    run.steps(100, wait=False)
    run.signal(1, signal.SIGKILL)
    run.check()  # takes a snapshot, of shards that have no leader at first
    run.steps(100)
    run.until_in_step()
    run.check()
    assert run.coordinator.queue.generation == 1
    assert [watch._leadership.leader for watch in run.coordinator._watches] == [0, 1]
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)


def test_a_server_that_is_stopped_and_resumed_does_no_harm(run):
    run.steps(100, wait=False)
    run.signal(0, signal.SIGSTOP)
    try:
        # One shard has moved, the other has no backup.
        run.until(lambda replicas: replicas.confirmed and replicas.term > 1)
        run.steps(200)
        run.check()
    finally:
        run.signal(0, signal.SIGCONT)
    run.until_in_step()
    run.steps(100)
    run.check()
    assert run.coordinator.queue.generation == 1


def test_both_servers_killed_send_all_back_to_the_snapshot_and_the_count_is_exact(run):
    run.check()  # takes a snapshot
    run.steps(200, wait=False)
    run.signal(0, signal.SIGKILL)
    run.signal(1, signal.SIGKILL)
    run.steps(100)
    run.check()
    assert run.coordinator.queue.generation > 1
    run.until_in_step()
