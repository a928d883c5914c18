"""A chex dataclass that threads its key: split in every step, one half draws, the other goes on; and an average of the
parameters beside them."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdist
from tests.examples.training import train

ROWS, FEATURES = 120, 6


@chex.dataclass(frozen=True)
class State:
    params: Any
    average: Any
    opt_state: optax.OptState
    key: jax.Array


optimizer = optax.sgd(0.1, momentum=0.9)


def create_state(key):
    key, k1, k2 = jax.random.split(key, 3)
    params = {"w": jax.random.normal(k1, (FEATURES, 16)) * 0.4, "v": jax.random.normal(k2, (16,)) * 0.25}
    return State(params=params, average=params, opt_state=optimizer.init(params), key=key)


def train_step(state, batch):
    key, noise_key = jax.random.split(state.key)
    hidden_kept = jax.random.bernoulli(noise_key, 0.8, (16,))  # whole units are dropped, for all rows alike

    def loss_fn(params):
        hidden = jnp.where(hidden_kept, jnp.tanh(batch["x"] @ params["w"]) / 0.8, 0)
        return jdist.mean((hidden @ params["v"] - batch["y"]) ** 2, batch["mask"])

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    updates, opt_state = jdist.optimizer(optimizer).update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    average = optax.incremental_update(params, state.average, step_size=0.2)
    return state.replace(params=params, average=average, opt_state=opt_state, key=key), {"loss": loss}


def main(strategy):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    dataset = jdist.data.from_arrays({"x": x, "y": np.sin(x.sum(-1))}, global_batch=32, shuffle_seed=7, epochs=3)
    state, history = train(strategy, create_state, train_step, dataset, 8)
    return {"state": state, "losses": history["loss"]}
