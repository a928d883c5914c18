"""optax's own accumulation: `optax.MultiSteps` keeps the gradients of three steps and updates by their mean."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import jdist

ROWS, EVERY = 240, 3

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
    digits = load_digits()
    arrays = {"image": digits.data[:ROWS].astype("float32") / 16, "label": digits.target[:ROWS]}
    dataset = jdist.data.from_arrays(arrays, global_batch=64, shuffle_seed=8, epochs=3)
    state = strategy.init(create_state, jax.random.key(9))
    step = jdist.distribute(train_step, strategy)
    history = []
    for batch in strategy.distribute_dataset(dataset):
        state, metrics = step(state, batch)
        history.append(metrics)
    assert [float(m["updates_now"]) for m in history] == 4 * [0, 0, 1]
    return {"state": strategy.fetch(state), "losses": [float(m["loss"]) for m in history]}
