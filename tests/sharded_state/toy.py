"""A small step over parameters that are cut in every way: along an axis, padded, and as one row of elements."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdist

SHAPES = {"up": (8, 16), "layers": (3, 16, 16), "odd": (7, 5, 3), "few": (5,)}
DATA = {"x": np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)}
TX = optax.adam(1e-2)


def create():
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    params = {name: jax.random.normal(key, SHAPES[name]) * 0.3 for name, key in zip(SHAPES, keys, strict=True)}
    return jdist.TrainState.create(params=params, tx=TX)


def step(state, batch):
    def loss_fn(params):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"] @ params["up"], params["layers"])
        return jdist.mean((x**2).sum(-1) * params["odd"].sum(), batch["mask"]) * jnp.cos(params["few"]).sum()

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def trained(strategy):
    distributed, state, losses = jdist.distribute(step, strategy), strategy.init(create), []
    for batch in strategy.distribute_dataset(jdist.data.from_arrays(DATA, global_batch=16)):
        state, metrics = distributed(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def num_wrong_of_large_parts(strategy):
    """Trains an array in two parts of 8 MiB by whole numbers; counts the elements that are not what NumPy computes."""
    shape = (2 << 20, 2)

    def step(state, batch):
        pattern = jnp.arange(shape[0] * shape[1], dtype=jnp.float32).reshape(shape) % 23
        grads = jdist.grad(lambda params: jnp.vdot(params["w"], pattern) * batch["x"].mean())(state.params)
        return state.apply_gradients(grads=grads)

    tx = optax.sgd(1.0)
    state = strategy.init(lambda: jdist.TrainState.create(params={"w": jnp.zeros(shape)}, tx=tx))
    train = jdist.distribute(step, strategy)
    for _ in range(4):
        for batch in strategy.distribute_dataset([{"x": np.arange(strategy.num_replicas, dtype=np.float32) * 2}]):
            state = train(state, batch)
    pattern = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape) % 23
    want = -4 * (strategy.num_replicas - 1) * pattern
    return int((strategy.fetch(state).params["w"] != want).sum())
