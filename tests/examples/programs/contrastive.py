"""Two towers and a contrastive loss (CLIP): every row of the global batch is a negative for every other, on any replica."""

import flax.linen as nn
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import jdist
from tests.examples.training import train

ROWS = 240


class Tower(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16)(nn.tanh(nn.Dense(32)(x)))
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


class Towers(nn.Module):
    @nn.compact
    def __call__(self, upper, lower):
        scale = self.param("scale", nn.initializers.constant(2.0), ())
        return Tower(name="upper")(upper), Tower(name="lower")(lower), jnp.exp(scale)


model = Towers()


def create_state(key):
    params = model.init(key, jnp.ones((1, 32)), jnp.ones((1, 32)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))


def train_step(state, batch):
    mask = batch["mask"]
    real = jdist.all_gather(mask)
    own = jdist.replica_id() * len(mask) + jnp.arange(len(mask))  # where the rows of this replica are among all

    def loss_fn(params):
        upper, lower, scale = state.apply_fn({"params": params}, batch["upper"], batch["lower"])
        losses = 0
        for anchors, others in ((upper, lower), (lower, upper)):
            logits = jnp.where(real, scale * anchors @ jdist.all_gather(others).T, -jnp.inf)
            losses += optax.softmax_cross_entropy_with_integer_labels(logits, own)
        return jdist.mean(losses, mask)

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def main(strategy):
    images = load_digits().data[:ROWS].astype("float32") / 16
    arrays = {"upper": images[:, :32], "lower": images[:, 32:]}
    dataset = jdist.data.from_arrays(arrays, global_batch=64, shuffle_seed=15, epochs=3)
    state, history = train(strategy, create_state, train_step, dataset, 15)
    return {"state": state, "losses": history["loss"]}
