"""Workers, servers and coordinators as real processes, killed and stopped: each call takes effect on every shard, once."""

import contextlib
import dataclasses
import os
import re
import signal
import threading
import time

import numpy as np
import pytest

import jdist
from jdist.errors import ClosureCancelledError, NoWorkersError, ShardLostError
from jdist.train import Checkpointer
from tests.by_default import some
from tests.ps import counting
from tests.ps.real_cluster import BOUND_S, TIMES, local, wait_until

pytestmark = pytest.mark.xdist_group("ps_faults")  # they share their servers
WORKERS = ("worker", 0), ("worker", 1)


class Job:
    """A strategy and its state, which has gone through some calls, and what each returned."""

    def __init__(self, strategy):
        self.strategy, self.totals = strategy, []
        self.step, self.state = jdist.distribute(counting.step, strategy), strategy.init(counting.create)

    @property
    def coordinator(self):
        return self.state.job.coordinator

    @property
    def rollbacks(self):
        """How often all servers have gone back to a snapshot; since the job began."""
        return self.coordinator.queue.generation - self.began_at

    def schedule(self, calls):
        """Schedules calls; what each returns."""
        made = []
        for _ in range(calls):
            self.state, metrics = self.step(self.state, counting.batch(len(self.totals)))
            self.totals.append(metrics["total"])
            made.append(metrics["total"])
        return made

    def train(self, calls):
        """Schedules calls and waits for them."""
        for total in self.schedule(calls):
            total.result(BOUND_S)

    def check(self):
        """That every call that was not cancelled took effect on every shard, once."""
        self.coordinator.queue.join(BOUND_S)
        counting.check(
            self.state, [i for i, total in enumerate(self.totals) if not isinstance(total.error, ClosureCancelledError)]
        )

    def dispatched(self, worker):
        """What the coordinator knows of a worker."""
        queue = self.coordinator.queue
        with queue.lock:
            return queue.dispatch.workers[worker]

    def await_lost(self, worker):
        """Waits until the coordinator has noticed that a worker is gone."""
        wait_until(lambda: self.dispatched(worker).state != "ready")

    def await_ready(self, worker, above=0):
        """Waits until a worker has come back, under an epoch above one."""
        wait_until(lambda: self.dispatched(worker).state == "ready" and self.dispatched(worker).epoch > above)


@pytest.fixture
def job(cluster):
    """A job that has begun, in asynchronous mode."""
    with running(cluster.strategy()) as made:
        yield made


@contextlib.contextmanager
def running(strategy, kind=Job):
    made = kind(strategy)
    try:
        made.train(20)
        made.began_at = made.coordinator.queue.generation
        yield made
    finally:
        made.state.job.close()


class TestAWorker:
    @pytest.mark.parametrize(
        "points",
        some(
            [
                (("push=before:kill@2", "push=in:kill@3"),),
                (("push=after:kill@2", "commit=after:kill@3"),),
                (("push=in:kill@4", "push=after:kill@2"),),
                (("commit=after:kill@2", "commit=after:kill@3"),),
            ],
            [(("push=before:kill@2", "push=in:kill@3"),), (("push=after:kill@2", "commit=after:kill@3"),)],
        ),
        ids=" and ".join,
    )
    def test_killed_at_each_moment_of_a_push(self, cluster, job, points):
        """Two at once, so that neither does all before the other has come."""
        who = WORKERS[: len(points)]
        cluster.start(*who, failpoints=points)
        job.schedule(60)
        cluster.await_killed(*who)
        cluster.start(*who)
        job.check()
        assert job.rollbacks == 0

    @pytest.mark.parametrize("mode", ["async", "sync"])
    def test_absent_when_a_job_begins_it_comes_later(self, cluster, mode):
        """What is asked of workers before the first step, their number of devices, one of them can say."""
        cluster.kill(("worker", 0))
        with running(cluster.strategy(mode=mode)) as job:
            batch = next(iter(job.strategy.distribute_dataset([{"x": np.ones((4, 1), np.float32)}])))
            assert batch["x"].shape == (4, 1)
            cluster.start(("worker", 0))
            job.await_ready(0)
            job.schedule(20)
            job.check()

    def test_killed_again_while_it_is_fenced(self, cluster, job):
        cluster.stop("ps", 1)  # so that nobody can be fenced
        job.schedule(60)
        for _ in range(2):
            cluster.start(("worker", 1))
        job.await_lost(1)
        cluster.kill(("worker", 1))
        cluster.resume("ps", 1)
        cluster.start(("worker", 1))
        job.check()
        job.await_ready(1, above=1)

    def test_stopped_for_longer_than_it_takes_to_be_lost_and_resumed(self, cluster, job):
        job.schedule(60)
        cluster.stop("worker", 1)
        job.await_lost(1)
        job.check()
        cluster.resume("worker", 1)
        job.await_ready(1, above=1)
        job.train(40)
        job.check()


class TestAllWorkers:
    def test_gone_are_waited_for_and_then_an_error_says_so_and_they_may_come_back(self, cluster, tmp_path):
        with running(cluster.strategy(times=dataclasses.replace(TIMES, no_worker_timeout_s=2.0))) as job:
            cluster.kill(*WORKERS)
            job.schedule(30)
            with pytest.raises(
                NoWorkersError, match=r"no worker has answered for .*The state on the servers is intact"
            ):
                job.coordinator.queue.join(BOUND_S)
            cancelled = sum(isinstance(total.error, ClosureCancelledError) for total in job.totals)
            assert cancelled
            job.check()  # it can be fetched
            with Checkpointer(tmp_path / "saved", check=job.strategy.check) as checkpoints:
                checkpoints.save(1, job.state, wait=True)
                assert int(job.strategy.fetch(checkpoints.restore(job.state).state)["n"]) == 50 - cancelled
            cluster.start(*WORKERS)
            job.train(20)
            job.check()


class TestAServer:
    def test_stopped_and_resumed_has_lost_nothing(self, cluster, job):
        job.schedule(60)
        cluster.stop("ps", 0)
        silent = job.totals[-1]
        with pytest.raises(TimeoutError):
            silent.result(3 * TIMES.lost_after_s)
        cluster.resume("ps", 0)
        job.check()
        assert job.rollbacks == 0

    def test_killed_sends_all_back_to_the_snapshot_and_it_is_said_how_many_run_again(self, cluster, job, caplog):
        job.coordinator.snapshots.take()
        job.train(30)
        cluster.kill(("ps", 0))
        job.schedule(10)
        cluster.start(("ps", 0))
        job.check()
        assert job.rollbacks == 1
        assert "parameter server 0 lost its memory" in caplog.text
        (again,) = re.findall(r"(\d+) closures run again", caplog.text)
        assert 30 <= int(again) <= 40

    @pytest.mark.parametrize(
        "options", some([{}, {"ps_replicas": 2}, {"mode": "sync"}], [{}, {"ps_replicas": 2}]), ids=str
    )
    def test_without_a_file_descriptor_it_is_waited_for(self, cluster, options):
        """When a job begins, and while it runs; what a server could not do was not wrong, and nothing runs again."""
        with cluster.starved(("ps", 0)) as freed:
            threading.Timer(2.0, freed).start()
            with running(cluster.strategy(**options)) as job:
                with cluster.starved(("ps", 0), ("ps", 1)):
                    job.schedule(60)
                    time.sleep(1.0)
                job.check()
                assert job.rollbacks == 0

    def test_without_a_file_descriptor_for_long_it_is_named(self, cluster):
        with running(cluster.strategy(times=dataclasses.replace(TIMES, ps_timeout_s=2.0))) as job:
            with cluster.starved(("ps", 1)), pytest.raises(ShardLostError) as info:
                job.train(60)
            assert re.search(
                r"server 127.0.0.1:\d+ has not answered for \d+ s: exhausted \(it has no file descriptor left",
                str(info.value),
            )

    def test_killed_together_with_a_worker(self, cluster, job):
        job.schedule(100)
        cluster.kill(("ps", 1), ("worker", 0))
        cluster.start(("ps", 1), ("worker", 0))
        job.check()
        assert job.rollbacks == 1

    def test_killed_in_a_snapshot_and_in_beginning_anew(self, cluster, job):
        cluster.start(("ps", 0), failpoints=["snapshot=in:kill"])
        job.train(10)
        job.schedule(50)
        queue = job.coordinator.queue
        with queue.lock:
            job.coordinator.snapshots.due()
        cluster.await_killed(("ps", 0))
        cluster.start(("ps", 0), failpoints=["replace=in:kill"])
        cluster.await_killed(("ps", 0))
        cluster.start(("ps", 0))
        job.check()
        assert job.rollbacks >= 2

    def test_gone_for_good_is_an_error_at_the_deadline_and_training_goes_on_with_one_in_its_place(self, cluster):
        with running(cluster.strategy(times=dataclasses.replace(TIMES, ps_timeout_s=2.0))) as job:
            cluster.kill(("ps", 1))
            totals = job.schedule(60)
            for _ in range(2):
                with pytest.raises(ShardLostError, match=f"the parameter server {cluster.addresses['ps'][1]} has not"):
                    job.coordinator.queue.join(BOUND_S)
            for total in totals:  # nobody waits for ever
                with contextlib.suppress(ShardLostError, ClosureCancelledError):
                    total.result(BOUND_S)
            cluster.start(("ps", 1))
            wait_until(lambda: job.rollbacks == 1)
            job.train(10)
            job.check()


class TestSynchronousMode:
    """Each call is one update by the mean of two workers' gradients, which are whole numbers: the result is exact."""

    @pytest.fixture
    def job(self, cluster):
        with running(cluster.strategy(mode="sync")) as made:
            yield made

    def test_a_worker_killed(self, cluster, job):
        job.schedule(40)
        job.totals[25].result(BOUND_S)
        cluster.start(("worker", 1))
        job.check()
        assert job.rollbacks == 0

    def test_a_server_killed(self, cluster, job):
        job.schedule(40)
        job.totals[25].result(BOUND_S)
        cluster.start(("ps", 0))
        job.check()
        assert job.rollbacks == 1


@pytest.mark.parametrize("count", some([400, 8000], [400]))
def test_every_closure_counts_once_on_every_shard_although_a_worker_is_killed_and_started_again(count):
    with local(local_workers=2, local_ps=2, partitioner=jdist.ps.fixed_shards(2)) as strategy:
        job = Job(strategy)
        job.schedule(count)
        job.totals[count // 4].result(BOUND_S)
        victim = job.state.job.servers.processes()[-1]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: job.state.job.servers.processes()[-1] != victim)
        job.coordinator.queue.join(4 * BOUND_S)
        assert [n for n, _ in counting.on_shards(job.state)] == [count, count]
        job.check()
