"""Parameter servers and workers as real processes, over gRPC."""

import os
import signal

import jax
import numpy as np
import optax
import pytest

import jdist
import jdist.ps
from jdist.errors import StepError
from jdist.strategies.parameter_server import parameter_server
from tests.by_default import some
from tests.ps.hidden_layer import create, train_step

ROWS = {
    "x": np.random.default_rng(0).normal(size=(320, 3)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=320).astype(np.float32),
}


def run(strategy, epochs, *, at=None, do=lambda job: None):
    """Trains, and does something to the job's processes before step `at`; the state and the losses."""
    step = jdist.distribute(train_step, strategy)
    state = strategy.init(lambda: create(optax.sgd(0.05, 0.9)))
    losses = []
    dataset = strategy.distribute_dataset(jdist.data.from_arrays(ROWS, global_batch=8, epochs=epochs))
    for i, batch in enumerate(dataset):
        if i == at:
            losses[at // 2].result(60)
            do(state.job)
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return state, strategy.fetch(state), [float(x) for x in losses]


@pytest.fixture
def servers():
    """Makes strategies, and ends their processes."""
    made = []

    def make(**options):
        strategy = parameter_server(**options)
        made.append(strategy)
        return strategy

    jobs = []
    yield make, jobs
    for job in jobs:
        job.close()


def test_one_worker_and_two_servers_do_what_one_device_does(servers):
    make, jobs = servers
    handle, found, losses = run(make(local_workers=1, local_ps=2, partitioner=jdist.ps.fixed_shards(2)), 1)
    jobs.append(handle.job)
    one = jdist.one_device()
    step, state = jdist.distribute(train_step, one), one.init(lambda: create(optax.sgd(0.05, 0.9)))
    expected = []
    for batch in one.distribute_dataset(jdist.data.from_arrays(ROWS, global_batch=8, epochs=1)):
        state, metrics = step(state, batch)
        expected.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(one.fetch(state).params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("local_ps", some([1, 2], [2]))
def test_a_worker_killed_in_the_middle_costs_no_step_and_none_counts_twice(servers, local_ps):
    make, jobs = servers
    strategy = make(local_workers=2, local_ps=local_ps, partitioner=jdist.ps.fixed_shards(local_ps))

    def kill(job):
        os.kill(job.servers.processes()[-1], signal.SIGKILL)

    handle, found, losses = run(strategy, 10, at=200, do=kill)
    jobs.append(handle.job)
    assert (int(found.step), len(losses)) == (400, 400)
    assert np.isfinite(losses).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found.params))


@pytest.mark.full
def test_a_server_killed_in_the_middle_sends_all_back_to_the_snapshot_and_the_count_is_exact(servers):
    make, jobs = servers
    strategy = make(local_workers=2, local_ps=2, partitioner=jdist.ps.fixed_shards(2))

    def kill(job):
        os.kill(job.servers.processes()[0], signal.SIGKILL)

    handle, found, losses = run(strategy, 10, at=200, do=kill)
    jobs.append(handle.job)
    assert (int(found.step), len(losses), handle.job.coordinator.queue.generation) == (400, 400, 2)
    assert np.isfinite(losses).all()


def test_closing_ends_every_process(servers):
    make, _ = servers
    strategy = make(local_workers=1, local_ps=1)
    state = strategy.init(lambda: create(optax.sgd(0.1)))
    pids = state.job.servers.processes()
    state.job.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_is_asked_wrongly_is_refused(servers):
    make, jobs = servers
    strategy = make(local_workers=1, local_ps=1)
    state = strategy.init(lambda: create(optax.sgd(0.1)))
    jobs.append(state.job)
    with pytest.raises(AttributeError, match=r"Take `strategy\.fetch\(state\)\.params` .* a learning rate .*argument"):
        _ = state.params
    with pytest.raises(StepError, match=r"Lower it under `jdist\.one_device"):
        jdist.distribute(train_step, strategy).lower(state, {})
