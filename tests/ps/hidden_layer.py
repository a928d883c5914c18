"""A regression with a hidden layer, of eight rows of which two are padding: what most tests of parameter servers train."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdist

RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(8, 3)).astype(np.float32),
    "y": RNG.normal(size=8).astype(np.float32),
    "mask": np.arange(8) < 6,
}


def rows(count):
    """As many rows without padding."""
    x, y = np.random.default_rng(0).normal(size=(count, 3)), np.random.default_rng(1).normal(size=count)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def raw(state):
    """The leaves of a state, of keys their data."""
    return [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(state)
    ]


def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["a"])
    return jdist.mean((hidden @ params["b"] - batch["y"]) ** 2, batch["mask"])


def create(tx, **extra):
    params = {"a": jnp.asarray(np.random.default_rng(1).normal(size=(3, 4)), jnp.float32), "b": jnp.ones(4)}
    return jdist.TrainState.create(params=params, tx=tx, rng=jax.random.key(3), **extra)


def train_step(state, batch):
    value, grads = jdist.value_and_grad(loss)(state.params, batch)
    noise = jax.random.normal(jax.random.fold_in(state.rng, state.step), ())
    return state.apply_gradients(grads=grads), {"loss": value, "noise": noise, "norm": optax.tree.norm(grads)}
