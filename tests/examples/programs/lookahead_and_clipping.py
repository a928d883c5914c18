"""Lookahead round SGD behind a clipped gradient; the loss is taken at the fast parameters, the slow ones are evaluated."""

import flax.linen as nn
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jdist
from tests.examples.training import digits, train

model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(10)])
tx = optax.lookahead(
    optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)), sync_period=3, slow_step_size=0.5
)


def create_state(key):
    params = optax.LookaheadParams.init_synced(model.init(key, jnp.zeros((1, 64))))
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state, batch):
    def loss_fn(fast):
        losses = optax.softmax_cross_entropy_with_integer_labels(state.apply_fn(fast, batch["image"]), batch["label"])
        return jdist.mean(losses, batch["mask"])

    loss, grads = jdist.value_and_grad(loss_fn)(state.params.fast)
    return state.apply_gradients(grads=grads), {"loss": loss, "norm": optax.tree.norm(grads)}


def main(strategy):
    state, history = train(strategy, create_state, train_step, digits(0), 0)
    assert max(history["norm"]) > 0.5  # the clipping clips
    return {"state": state, "losses": history["loss"]}
