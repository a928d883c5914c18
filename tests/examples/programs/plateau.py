"""An optimiser that wants the loss as well: the rate falls where the loss does not (`optax.contrib.reduce_on_plateau`)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdist
from tests.examples.training import train

ROWS, FEATURES = 120, 6

optimizer = optax.chain(
    optax.sgd(0.4, momentum=0.9), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0)
)


def create_state(key):
    params = {"w": jax.random.normal(key, (FEATURES,)), "b": jnp.zeros(())}
    return {"params": params, "opt": optimizer.init(params)}


def train_step(state, batch):
    def loss_fn(params):
        return jdist.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2, batch["mask"])

    loss, grads = jdist.value_and_grad(loss_fn)(state["params"])
    updates, opt = jdist.optimizer(optimizer).update(grads, state["opt"], state["params"], value=loss)
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {
        "loss": loss,
        "scale": state["opt"][-1].scale,
    }


def main(strategy):
    rng = np.random.default_rng(10)
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    y = (x.sum(-1) + rng.normal(size=ROWS)).astype(np.float32)
    dataset = jdist.data.from_arrays({"x": x, "y": y}, global_batch=32, shuffle_seed=10, epochs=3)
    state, history = train(strategy, create_state, train_step, dataset, 11)
    assert history["scale"][-1] < 1  # it was on a plateau
    return {"state": state, "losses": history["loss"], "scales": history["scale"]}
