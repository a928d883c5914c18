"""Links between servers are cut without a word: nobody waits for whom the cut does not concern, and nothing is lost."""

import dataclasses

import pytest

from tests.ps import test_faults as faults
from tests.ps.netns import spread
from tests.ps.real_cluster import BOUND_S, TIMES, wait_until

pytestmark = pytest.mark.xdist_group(__name__)  # they share their servers

PATIENT = dataclasses.replace(TIMES, lost_after_s=5.0)  # so that what is seen is the link's, not a busy machine's


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with spread(tmp_path_factory.mktemp("spread")) as made:
        yield made


def both_in_step(job):
    return all(None not in watch._leadership.holds for watch in job.coordinator._watches)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_leader_cut_off_from_its_backup_goes_on_without_it_until_the_link_is_there(cluster, caplog, mode):
    with faults.running(cluster.strategy(mode=mode, ps_replicas=2, times=PATIENT)) as job:
        wait_until(lambda: both_in_step(job))
        cluster.cut(("ps", 0), ("ps", 1))
        try:
            job.train(60)
            assert not both_in_step(job)
            one, other = cluster.addresses["ps"]
            assert (
                f"the parameter servers {one} and {other} both answer, but the first does not reach the second"
                in caplog.text
            )
            job.train(20)
        finally:
            cluster.mend(("ps", 0), ("ps", 1))
        wait_until(lambda: both_in_step(job))
        assert "shard 0 has two copies in step again" in caplog.text
        cluster.kill(("ps", 0))  # what the copy that came back holds is all there is of shard 0
        job.train(20)
        job.check()
        assert job.rollbacks == 0
        cluster.start(("ps", 0))


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_worker_cut_off_from_a_server_gives_back_what_it_had_and_comes_again(cluster, caplog, mode):
    with faults.running(cluster.strategy(mode=mode, times=PATIENT)) as job:
        job.coordinator.snapshots.take()
        scheduled = job.schedule(40)
        cluster.cut(("worker", 1), ("ps", 0))
        try:
            scheduled += job.schedule(40)
            for total in scheduled:
                total.result(BOUND_S)
            job.coordinator.snapshots.take()  # nothing that is with the other worker holds it up
            assert job.dispatched(1).state != "ready"
            worker, ps = cluster.addresses["worker"][1], cluster.addresses["ps"][0]
            why = f"{worker}: it does not reach the parameter server {ps}, which answers here: the link between them is cut"
            assert f"worker 1 was lost; its closures run again: {why}" in caplog.text
            job.train(20)
        finally:
            cluster.mend(("worker", 1), ("ps", 0))
        job.await_ready(1)
        assert caplog.text.count("the link between them is cut") == 1
        assert "worker 1 is back" in caplog.text
        job.train(20)
        job.check()
        assert job.rollbacks == 0
