"""Pure `(init, apply)` as haiku's `transform` makes it, a NamedTuple as state, and the key an argument of the step.

The key draws noise on the weights, the same for every row, so it has to be the same on every replica, which it is.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdist

ROWS, FEATURES = 120, 6
SIZES = {"mlp/~/linear_0": (FEATURES, 16), "mlp/~/linear_1": (16, 1)}


class State(NamedTuple):
    params: dict
    opt_state: optax.OptState
    step: jax.Array


class Model(NamedTuple):
    init: callable
    apply: callable


def transform():
    def init(key, x):
        keys = jax.random.split(key, len(SIZES))
        return {
            name: {"w": jax.random.normal(k, shape) / shape[0] ** 0.5, "b": jnp.zeros(shape[1])}
            for k, (name, shape) in zip(keys, SIZES.items(), strict=True)
        }

    def apply(params, key, x):
        for i, layer in enumerate(params.values()):
            w = layer["w"] * (1 + 0.05 * jax.random.normal(jax.random.fold_in(key, i), layer["w"].shape))
            x = x @ w + layer["b"]
            x = jax.nn.tanh(x) if i + 1 < len(params) else x
        return x[:, 0]

    return Model(init, apply)


model = transform()
optimizer = optax.chain(optax.trace(decay=0.9), optax.scale(-0.1))


def initial_state(key):
    params = model.init(key, jnp.zeros((1, FEATURES)))
    return State(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def update(state, batch, key):
    def loss_fn(params):
        return jdist.mean((model.apply(params, key, batch["x"]) - batch["y"]) ** 2, batch["mask"])

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    updates, opt_state = jdist.optimizer(optimizer).update(grads, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    return State(params, opt_state, state.step + 1), {"loss": loss}


def main(strategy):
    rng = np.random.default_rng(6)
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    dataset = jdist.data.from_arrays({"x": x, "y": np.sin(x.sum(-1))}, global_batch=32, shuffle_seed=6, epochs=3)
    key, init_key = jax.random.split(jax.random.PRNGKey(7))
    state = strategy.init(initial_state, init_key)
    step = jdist.distribute(update, strategy)
    losses = []
    for batch in strategy.distribute_dataset(dataset):
        key, step_key = jax.random.split(key)
        state, metrics = step(state, batch, step_key)
        losses.append(metrics["loss"])
    return {"state": strategy.fetch(state), "losses": [float(loss) for loss in losses]}
