"""A task as a user would write it: linear regression on made-up data, named in configs as `toy_regression:make`."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jdist
from jdist.data import from_arrays
from jdist.errors import ConfigError
from jdist.tasks import Task
from jdist.tasks.options import OptionError

# In a run folder, once the run has ended.
FILES = "checkpoints config.yaml curves.png environment.json metrics.jsonl result.json source times.jsonl"
_PATHS = [str(Path(__file__).parents[2]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(filter(None, _PATHS))}  # of a process that trains this task
CONFIG = """\
name: toy
task: {make: "toy_regression:make"}
train:
  global_batch: 16
  steps: 24
  optimizer: {name: adamw, learning_rate: 1e-2}
eval: {every: 8, global_batch: 8}
checkpoint: {every: 8, best: eval/close, mode: max}
log: {every: 4}
"""


def make(rows: int = 52, features: int = 3, noise: float = 0.1, poison_row: int | None = None, file: str = "") -> Task:
    """`rows` is no multiple of the batches used, so that every epoch ends in a short one; a poisoned row is NaN."""
    if file:
        np.load(file)
    if features < 1:
        raise OptionError("features", f"{features} is not one or more", remedy=" Say 3.")
    draw = np.random.default_rng(7)
    x = draw.normal(size=(rows, features)).astype(np.float32)
    y = x @ np.arange(1, features + 1, dtype=np.float32) + noise * draw.normal(size=rows).astype(np.float32)
    held_out = {"x": x[:21], "y": y[:21]}
    if poison_row is not None:
        y = y.copy()
        y[poison_row] = np.nan

    def errors(params, batch):
        return (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2

    def create_state(key, tx):
        params = {"w": jax.random.normal(key, (features,)), "b": jnp.zeros(())}
        return jdist.TrainState.create(params=params, tx=tx, rng=key)

    def train_step(state, batch):
        def loss_fn(params):
            return jdist.mean(errors(params, batch), batch["mask"])

        loss, grads = jdist.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    def eval_step(state, batch):
        squared = errors(state.params, batch)
        return {
            "loss": jdist.mean(squared, batch["mask"]),
            "close": jdist.mean((squared < 1.0).astype(jnp.float32), batch["mask"]),
        }

    def train_data(global_batch, seed, epochs):
        return from_arrays({"x": x, "y": y}, global_batch=global_batch, shuffle_seed=seed, epochs=epochs)

    def eval_data(global_batch):
        return from_arrays(held_out, global_batch=global_batch)

    return Task(
        create_state=create_state,
        train_step=train_step,
        eval_step=eval_step,
        train_data=train_data,
        eval_data=eval_data,
        baselines=lambda: {"loss of predicting the mean": float(np.var(held_out["y"]))},
    )


def broken():
    raise ConfigError("no data today.")


def not_a_task():
    return {"model": None}


number = 3


def reads() -> Task:
    """Reads a file that no option names, and is not there."""
    return np.load("lost.npy")
