"""A task whose steps return what metrics contribute, as a user would write it; named as `toy_classes:make`."""

import jax.numpy as jnp
import numpy as np
import optax

import jdist
from jdist.tasks import Task

CONFIG = """\
name: classes
task: {make: "toy_classes:make"}
train:
  global_batch: 16
  steps: 8
  optimizer: {name: sgd, learning_rate: 0.5}
eval: {every: 4, global_batch: 8}
checkpoint: {best: eval/auc}
log: {every: 4}
"""
X = np.random.default_rng(3).normal(size=(52, 2)).astype(np.float32)
DATA = {"x": X, "y": (X @ np.array([1.0, -1.0], np.float32) + X[:, 0] ** 2 > 0).astype(np.int32)}
HELD_OUT = {name: rows[:21] for name, rows in DATA.items()}


def make(how: str = "by name") -> Task:
    """`how`: "by name", "all at once" by one collection, or "undeclared"."""
    each = {
        "loss": jdist.metrics.mean(),
        "accuracy": jdist.metrics.accuracy(),
        "auc": jdist.metrics.auc(),
        "confusion": jdist.metrics.confusion_matrix(2),
    }
    whole = jdist.metrics.collect(each)

    def logits_and_losses(params, batch):
        logits = batch["x"] @ params["w"] + params["b"]
        return logits, optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    def train_step(state, batch):
        def loss_fn(params):
            logits, losses = logits_and_losses(params, batch)
            return jdist.mean(losses, batch["mask"]), logits

        (loss, logits), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state.params)
        measured = {"loss": loss}
        if how == "by name":
            measured["accuracy"] = each["accuracy"].update(logits, batch["y"], batch["mask"])
        return state.apply_gradients(grads=grads), measured

    def eval_step(state, batch):
        logits, losses = logits_and_losses(state.params, batch)
        inputs = {
            "loss": losses,
            "accuracy": (logits, batch["y"]),
            "auc": (logits[:, 1] - logits[:, 0], batch["y"]),
            "confusion": (logits, batch["y"]),
        }
        measured = whole.update(inputs, batch["mask"])
        return measured if how == "all at once" else measured | {"loss": jdist.mean(losses, batch["mask"])}

    named = {name: metric for name, metric in each.items() if name != "loss"}
    return Task(
        create_state=lambda key, tx: jdist.TrainState.create(
            params={"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)}, tx=tx, rng=key
        ),
        train_step=train_step,
        eval_step=eval_step,
        train_data=lambda global_batch, seed, epochs: jdist.data.from_arrays(
            DATA, global_batch=global_batch, shuffle_seed=seed, epochs=epochs
        ),
        eval_data=lambda global_batch: jdist.data.from_arrays(HELD_OUT, global_batch=global_batch),
        metrics={"by name": named, "all at once": whole, "undeclared": None}[how],
    )
