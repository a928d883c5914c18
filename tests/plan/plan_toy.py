"""A task small enough to compile at once: two layers on made-up rows, named in configs as `tests.plan.plan_toy:make`."""

import jax
import jax.numpy as jnp
import numpy as np

import jdist
from jdist.data import from_arrays
from jdist.tasks import Task

CONFIG = """
name: toy
task: {make: "tests.plan.plan_toy:make"}
train: {global_batch: 64, steps: 4, optimizer: {name: sgd, learning_rate: 0.1}}
"""


def config_file(folder):
    """Writes the config into a folder; its path."""
    path = folder / "toy.yaml"
    path.write_text(CONFIG)
    return path


def make(width: int = 32) -> Task:
    x = np.ones((48, 16), np.float32)  # fewer rows than a global batch: the shapes are still those of a full one

    def create_state(key, tx):
        first, second = jax.random.split(key)
        params = {"a": jax.random.normal(first, (16, width)), "b": jax.random.normal(second, (width, 1))}
        return jdist.TrainState.create(params=params, tx=tx, rng=key)

    def train_step(state, batch):
        def loss_fn(params):
            return jdist.mean((jnp.tanh(batch["x"] @ params["a"]) @ params["b"])[:, 0] ** 2, batch["mask"])

        loss, grads = jdist.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return Task(
        create_state=create_state,
        train_step=train_step,
        eval_step=lambda state, batch: {"loss": jnp.zeros(())},
        train_data=lambda global_batch, seed, epochs: from_arrays({"x": x}, global_batch=global_batch, epochs=epochs),
        eval_data=lambda global_batch: from_arrays({"x": x}, global_batch=global_batch),
    )
