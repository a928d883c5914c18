"""A strategy and its steps are collected once nobody holds them: a notebook makes many of both."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.step.base import Distributed

MAKE = {
    "one_device": jdist.one_device,
    "shard_map": jdist.mirrored,
    "pmap": lambda: jdist.mirrored(transform="pmap"),
    "jit": lambda: jdist.mirrored(transform="jit"),
    "central_storage": jdist.central_storage,
    "compressed": lambda: jdist.mirrored(all_reduce={"name": "compressed", "dtype": "bf16"}),
}
BATCH = {"x": np.ones((16, 4), np.float32)}


def create():
    return {"w": jnp.ones((4, 4))}


def step(state, batch):
    loss, grads = jdist.value_and_grad(lambda w: jnp.mean(jax.nn.relu(batch["x"] @ w) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * grads}, {"loss": loss}


def call(strategy, **options):
    train_step = jdist.distribute(lambda state, batch: step(state, batch), strategy, **options)
    state, _ = train_step(strategy.init(create), BATCH)
    strategy.fetch(train_step(state, BATCH)[0])
    return train_step


def feed(strategy):
    train_step = jdist.distribute(lambda state, batch: step(state, batch), strategy)
    state = strategy.init(create)
    batches = strategy.distribute_dataset(jdist.data.from_arrays(BATCH, global_batch=8))
    for batch in batches:
        state, _ = train_step(state, batch)
    batches.close()
    return train_step


def values(strategy):
    if strategy.transform == "jit":
        pytest.skip("there are no replicas to run on")
    strategy.gather(strategy.run(lambda: jnp.ones(1) * jdist.replica_id()), 0)


def loop(strategy):
    jdist.fit(step, create(), BATCH, strategy=strategy, global_batch=8, progress=False, log_to=None)


USES = {
    "call": call,
    "accumulate": lambda strategy: call(strategy, accumulate=2),
    "fp16": lambda strategy: call(strategy, precision=jdist.precision("fp16")),
    "lower": lambda strategy: jdist.distribute(step, strategy).lower(strategy.init(create), BATCH),
    "feed": feed,
    "values": values,
    "loop": loop,
}


@pytest.mark.usefixtures("quick_collection")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", MAKE)
def test_a_strategy_and_its_step_are_collected(name, use):
    def work():
        strategy = MAKE[name]()
        used = USES[use](strategy)
        return [weakref.ref(strategy), *([weakref.ref(used)] if isinstance(used, Distributed) else [])]

    kept = work()
    gc.collect()
    assert [each() for each in kept] == [None] * len(kept)
