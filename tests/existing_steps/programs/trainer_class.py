"""A trainer: its step is a method, with what it needs on the object."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax


def load_batches(num_steps, batch_size):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_steps, batch_size, 6)).astype(np.float32)
    return [{"x": each, "y": each.sum(-1)} for each in x]


def main(strategy):
    class Trainer:
        def __init__(self, tx, weight_decay):
            self.tx, self.weight_decay = tx, weight_decay

        def init(self, key):
            params = {"w": jax.random.normal(key, (6,)), "b": jnp.zeros(())}
            return {"params": params, "opt": self.tx.init(params)}

        def loss(self, params, batch):
            errors = batch["x"] @ params["w"] + params["b"] - batch["y"]
            return (errors**2).mean() + self.weight_decay * (params["w"] ** 2).sum()

        @functools.partial(jax.jit, static_argnums=0)
        # jdist: @jdist.distribute(strategy)
        def train_step(self, state, batch):
            loss, grads = jax.value_and_grad(self.loss)(state["params"], batch)
            # jdist: loss, grads = jdist.value_and_grad(self.loss)(state["params"], batch)
            updates, opt = self.tx.update(grads, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    trainer = Trainer(optax.sgd(0.1), weight_decay=1e-3)
    state, losses = trainer.init(jax.random.key(0)), []
    for batch in load_batches(num_steps=6, batch_size=16):
        # jdist: for batch in strategy.distribute_dataset(load_batches(num_steps=6, batch_size=16)):
        state, metrics = trainer.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return {"state": state, "losses": losses}
