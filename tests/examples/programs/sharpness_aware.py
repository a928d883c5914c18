"""Sharpness-aware minimisation: the gradient of the step is taken where the loss of the whole batch is worst nearby."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jdist
from tests.examples.training import digits, train

RADIUS = 0.1

model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(10)])


def create_state(key):
    return TrainState.create(apply_fn=model.apply, params=model.init(key, jnp.zeros((1, 64))), tx=optax.sgd(0.3))


def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn(params, batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jdist.mean(losses, batch["mask"])

    loss, ascent = jdist.value_and_grad(loss_fn)(state.params)
    scale = RADIUS / optax.tree.norm(ascent)
    grads = jdist.grad(loss_fn)(jax.tree.map(lambda p, g: p + scale * g, state.params, ascent))
    return state.apply_gradients(grads=grads), {"loss": loss}


def main(strategy):
    state, history = train(strategy, create_state, train_step, digits(14), 14)
    return {"state": state, "losses": history["loss"]}
