"""A pmap step that averages loss and gradients itself; with jdist's value_and_grad they are averaged already."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.training import common_utils
from jax import lax

tx = optax.sgd(0.1, momentum=0.9)


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"])
    return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)


def main(strategy):
    rng = np.random.default_rng(10)
    xs = rng.normal(size=(8, 32, 5)).astype(np.float32)
    batches = [{"x": x, "y": np.cos(x[:, 0])} for x in xs]
    params = {"w1": jax.random.normal(jax.random.key(0), (5, 8)), "w2": jax.random.normal(jax.random.key(1), (8,))}
    state = {"params": params, "opt": tx.init(params)}

    @functools.partial(jax.pmap, axis_name="batch")
    # jdist: @jdist.distribute(strategy)
    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        # jdist: loss, grads = jdist.value_and_grad(loss_fn)(state["params"], batch)
        loss, grads = lax.pmean((loss, grads), axis_name="batch")
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    state = jax_utils.replicate(state)
    # jdist:
    losses = []
    for batch in map(common_utils.shard, batches):
        # jdist: for batch in strategy.distribute_dataset(batches):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"].mean()))
    state = jax_utils.unreplicate(state)
    # jdist: state = strategy.fetch(state)
    return {"state": state, "losses": losses}
