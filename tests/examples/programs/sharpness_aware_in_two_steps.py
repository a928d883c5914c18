"""Sharpness-aware minimisation where a step may have one gradient only: two steps, the first finds where the second looks."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jdist
from tests.examples.training import digits

RADIUS = 0.1

model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(10)])


def create_state(key):
    params = model.init(key, jnp.zeros((1, 64)))
    return {
        "model": TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.3)),
        "ascent": jax.tree.map(jnp.zeros_like, params),
    }


def loss_at(params, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model.apply(params, batch["image"]), batch["label"])
    return jdist.mean(losses, batch["mask"])


def ascent_step(state, batch):
    loss, grads = jdist.value_and_grad(loss_at)(state["model"].params, batch)
    scale = RADIUS / optax.tree.norm(grads)
    return {**state, "ascent": jax.tree.map(lambda g: scale * g, grads)}, {"loss": loss}


def descent_step(state, batch):
    worst = jax.tree.map(jnp.add, state["model"].params, state["ascent"])
    loss, grads = jdist.value_and_grad(loss_at)(worst, batch)
    return {**state, "model": state["model"].apply_gradients(grads=grads)}, {"loss": loss}


def main(strategy):
    state = strategy.init(create_state, jax.random.key(14))
    ascend, descend = (jdist.distribute(step, strategy) for step in (ascent_step, descent_step))
    losses = []
    for batch in strategy.distribute_dataset(digits(14)):
        state, metrics = ascend(state, batch)
        losses.append(metrics["loss"])
        state, _ = descend(state, batch)
    return {"state": strategy.fetch(state), "losses": [float(loss) for loss in losses]}
