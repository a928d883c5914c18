"""A task is one replica's view: over eight devices it gives what it gives on one."""

import jax
import numpy as np
import optax
import pytest

import jdist
from jdist.tasks import arrays


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(65, 3))
    path = tmp_path_factory.mktemp("arrays") / "data.npz"
    np.savez(path, x=x, y=(x.sum(axis=1) > 0).astype(np.int64))
    return arrays.make(path=str(path), hidden=[8])


def run(task, strategy):
    """Losses of two epochs, and the metrics of each evaluation batch; both end on a short batch."""
    state = strategy.init(lambda key: task.create_state(key, optax.sgd(0.5)), jax.random.key(0))
    train_step = jdist.distribute(task.train_step, strategy)
    losses = []
    for batch in strategy.distribute_dataset(task.train_data(16, 0, 2)):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    eval_step = jdist.distribute(task.eval_step, strategy, args=("state", "batch"), returns=("metrics",))
    batches = strategy.distribute_dataset(task.eval_data(8))
    return losses, [jax.device_get(eval_step(state, batch)) for batch in batches]


def test_eight_replicas_equal_one_device_with_short_batches(task):
    one_losses, one_metrics = run(task, jdist.one_device())
    strategy = jdist.mirrored()
    assert strategy.num_replicas == 8
    losses, metrics = run(task, strategy)
    assert len(losses) == 8  # 52 rows in batches of 16, twice
    np.testing.assert_allclose(losses, one_losses, rtol=1e-4)
    assert len(metrics) == 2  # 13 rows in batches of 8
    for mine, theirs in zip(metrics, one_metrics, strict=True):
        for name in ("loss", "accuracy"):
            np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-4)
