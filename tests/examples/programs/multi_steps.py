"""optax's own accumulation: `optax.MultiSteps` keeps the gradients of three steps and updates by their mean."""

import flax.linen as nn
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jdist
from tests.examples.training import digits, train

EVERY = 3

model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(10)])
tx = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.3, momentum=0.9)), every_k_schedule=EVERY)


def create_state(key):
    params = model.init(key, jnp.zeros((1, 64)))
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn(params, batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jdist.mean(losses, batch["mask"])

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    updates_now = state.opt_state.mini_step == EVERY - 1
    return state.apply_gradients(grads=grads), {"loss": loss, "updates_now": updates_now}


def main(strategy):
    state, history = train(strategy, create_state, train_step, digits(8, epochs=3), 9)
    assert history["updates_now"] == 4 * [0, 0, 1]
    return {"state": state, "losses": history["loss"]}
