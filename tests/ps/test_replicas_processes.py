"""`ps_replicas=2` with real processes and real signals: what is killed or stopped costs no update."""

import os
import signal

import pytest

import jdist
from jdist.ps import Times, fixed_shards
from tests.ps.real_cluster import wait_until
from tests.ps.test_faults import Job, running

TIMES = Times(ping_s=0.375, lost_after_s=1.5, max_losses=10_000)


class Run(Job):
    """A job whose local servers each have a backup of the other's shard."""

    def signal(self, number, which):
        os.kill(self.pid(number), which)

    def pid(self, number):
        return self.state.job.servers.processes()[number]

    def until(self, is_so):
        """Waits until something is so of both shards' copies."""
        for watch in self.coordinator._watches:
            wait_until(lambda watch=watch: is_so(watch._leadership))

    def until_in_step(self):
        self.until(
            lambda replicas: replicas.confirmed and None not in replicas.holds and replicas.holds == replicas.alive
        )


@pytest.fixture
def run():
    options = {"local_workers": 2, "local_ps": 2, "ps_replicas": 2, "partitioner": fixed_shards(2)}
    with running(jdist.parameter_server(times=TIMES, **options), Run) as run:
        run.until_in_step()
        yield run


def test_a_server_killed_and_then_the_other_cost_no_update(run):
    before = run.pid(0)
    run.schedule(200)
    run.signal(0, signal.SIGKILL)
    run.train(200)
    run.until_in_step()  # it came back, and is the backup
    run.check()
    assert run.rollbacks == 0
    assert [watch._leadership.leader for watch in run.coordinator._watches] == [1, 0]  # both on the second server
    run.schedule(100)
    run.signal(1, signal.SIGKILL)
    run.check()  # takes a snapshot, of shards that have no leader at first
    run.train(100)
    run.until_in_step()
    run.check()
    assert run.rollbacks == 0
    assert [watch._leadership.leader for watch in run.coordinator._watches] == [0, 1]
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)


def test_a_server_that_is_stopped_and_resumed_does_no_harm(run):
    run.schedule(100)
    run.signal(0, signal.SIGSTOP)
    try:
        # One shard has moved, the other has no backup.
        run.until(lambda replicas: replicas.confirmed and replicas.term > 1)
        run.train(200)
        run.check()
    finally:
        run.signal(0, signal.SIGCONT)
    run.until_in_step()
    run.train(100)
    run.check()
    assert run.rollbacks == 0


def test_both_servers_killed_send_all_back_to_the_snapshot_and_the_count_is_exact(run):
    run.check()  # takes a snapshot
    run.schedule(200)
    run.signal(0, signal.SIGKILL)
    run.signal(1, signal.SIGKILL)
    run.train(100)
    run.check()
    assert run.rollbacks > 0
    run.until_in_step()
