"""Sharpness-aware minimisation: the gradient of the step is taken where the loss of the whole batch is worst nearby."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import jdist

ROWS, RADIUS = 240, 0.1

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
    digits = load_digits()
    arrays = {"image": digits.data[:ROWS].astype("float32") / 16, "label": digits.target[:ROWS]}
    dataset = jdist.data.from_arrays(arrays, global_batch=64, shuffle_seed=14, epochs=2)
    state = strategy.init(create_state, jax.random.key(14))
    step = jdist.distribute(train_step, strategy)
    losses = []
    for batch in strategy.distribute_dataset(dataset):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return {"state": strategy.fetch(state), "losses": [float(loss) for loss in losses]}
