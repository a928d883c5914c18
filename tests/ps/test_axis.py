"""Steps that name their mesh axis, as `pmap` programs do, under a parameter server."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jdist
from jdist.errors import StepError, StrategyError
from tests.ps.real_cluster import local

BATCH = {"x": np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)}
BATCH["y"] = BATCH["x"].sum(1, keepdims=True)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, axis_name="batch")(nn.Dense(3)(x))
        return nn.Dense(1)(nn.relu(x))


def create():
    variables = Model().init(jax.random.key(0), BATCH["x"])
    return jdist.TrainState.create(
        params=variables["params"],
        tx=optax.sgd(0.1),
        aggregation={"batch_stats": "mean"},
        batch_stats=variables["batch_stats"],
    )


def train_step(state, batch):
    def loss_of(params):
        variables = {"params": params, "batch_stats": state.extra["batch_stats"]}
        predicted, new = Model().apply(variables, batch["x"], mutable=["batch_stats"])
        return jnp.mean((predicted - batch["y"]) ** 2), new["batch_stats"]

    (loss, stats), grads = jdist.value_and_grad(loss_of, has_aux=True)(state.params)
    grads = jax.lax.pmean(grads, axis_name="batch")
    metrics = jax.lax.pmean({"loss": loss}, axis_name="batch")
    return state.apply_gradients(grads=grads, batch_stats=stats), metrics


def train(strategy):
    step, state, losses = jdist.distribute(train_step, strategy), strategy.init(create), []
    for _ in range(3):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return losses, strategy.fetch(state).params


@pytest.mark.usefixtures("quick_collection")
@pytest.mark.parametrize("devices", [1, 2])
def test_a_step_of_pmap(devices):
    with local(local_workers=1, local_ps=1, devices_per_worker=devices, axis="batch") as strategy:
        got = train(strategy)
    want = train(jdist.mirrored(jax.devices()[:devices], axis="batch"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
    kept = weakref.ref(strategy)
    del strategy
    gc.collect()
    assert kept() is None


def test_another_name_is_refused_with_what_to_write():
    wanted = r"batch.*does not bind.*jdist.parameter_server\(axis=\.\.\.\)"
    with local(local_workers=1, local_ps=1) as strategy, pytest.raises(StepError, match=wanted):
        train(strategy)


def test_what_is_no_name():
    with pytest.raises(StrategyError, match="`axis` is 3; it must be a name"):
        jdist.parameter_server(local_workers=1, axis=3)
