"""Lookahead round SGD behind a clipped gradient; the loss is taken at the fast parameters, the slow ones are evaluated."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import jdist

ROWS = 240

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
    digits = load_digits()
    arrays = {"image": digits.data[:ROWS].astype("float32") / 16, "label": digits.target[:ROWS]}
    dataset = jdist.data.from_arrays(arrays, global_batch=64, shuffle_seed=0, epochs=2)
    state = strategy.init(create_state, jax.random.key(0))
    step = jdist.distribute(train_step, strategy)
    history = []
    for batch in strategy.distribute_dataset(dataset):
        state, metrics = step(state, batch)
        history.append(metrics)
    assert max(float(m["norm"]) for m in history) > 0.5  # the clipping clips
    return {"state": strategy.fetch(state), "losses": [float(m["loss"]) for m in history]}
