"""What a step does, from its compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.errors import StepError

BATCH = {"x": np.ones((16, 64), np.float32)}


def create():
    return jdist.TrainState.create(params={"w": jnp.ones((64, 512)), "b": jnp.zeros(512)}, tx=optax.adam(1e-3))


def train_step(state, batch):
    def loss_fn(params):
        return jnp.mean((batch["x"] @ params["w"] + params["b"]) ** 2)

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


@pytest.mark.parametrize("from_shapes", [False, True])
def test_parts_and_what_is_exchanged(from_shapes):
    strategy = jdist.sharded(within=4)
    step = jdist.distribute(train_step, strategy)
    state = jax.eval_shape(create) if from_shapes else strategy.init(create)
    found = jdist.explain(step, state, BATCH)
    assert found.state == strategy.report(state)
    bytes_of = {(c.kind, c.axes): c.bytes for c in found.collectives}
    weights = 64 * 512 * 4
    assert bytes_of["all-gather", "replica_in_group"] == weights
    assert bytes_of["reduce-scatter", "replica_in_group"] == weights
    assert found.arguments < 3 * weights / 4 * 1.1
    text = str(found)
    assert "axis 0 cut in 4 parts [16, 512], 2 copies" in text
    assert "collectives in one call\n" in text
    assert f"{weights:,}" in text
    assert found._repr_html_().count("<table") == 2


def test_one_device_exchanges_nothing():
    found = jdist.explain(jdist.distribute(train_step, jdist.one_device()), jax.eval_shape(create), BATCH)
    assert "collectives in one call: none" in str(found)


def test_what_is_no_step():
    with pytest.raises(StepError, match=r"jdist\.explain takes a step that .* got a function"):
        jdist.explain(train_step, jax.eval_shape(create), BATCH)
