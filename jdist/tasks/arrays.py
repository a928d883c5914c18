"""A linear model or an MLP on the arrays `x` and `y` of an `.npz` file: classification or regression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jdist
from jdist.loop.task import Task
from jdist.tasks import options, table


def make(
    *,
    path: str,
    kind: str | None = None,
    hidden: Sequence[int] = (),
    dropout: float = 0.0,
    standardise: bool = True,
    held_out: float = 0.2,
    split_seed: int = 0,
) -> Task:
    """Makes the task of predicting `y` from `x`.

    Args:
        path: an `.npz` file with `x`, numbers [rows, ...], and `y`: [rows] classes (whole numbers, bools or
            strings), or numbers [rows] or [rows, outputs].
        kind: "classification" or "regression"; None: regression if `y` is floating point, else
            classification.
        hidden: widths of the hidden layers; empty for a linear model.
        dropout: share of each hidden layer dropped in training.
        standardise: shift and scale `x`, and `y` in regression, to mean 0 and variance 1 on the training
            rows.
        held_out: share of the rows to evaluate on.
        split_seed: seeds the choice of those rows.

    Returns:
        A task with batches {"x": float32 [rows, features], "y": int32 [rows] or float32 [rows, outputs]}. Its
        metrics are "loss" and "accuracy", or "loss" (squared error, in variances of `y` if standardised) and
        "mean_absolute_error" (in units of `y`); its baseline is the best constant prediction.

    Raises:
        ConfigError: an option is out of range, or the file does not serve.

    Example:
        task = make(path="data/diabetes.npz", hidden=[32])
    """
    if kind is not None:
        kind = options.one_of("kind", kind, ("classification", "regression"))
    widths = tuple(options.whole(f"hidden.{index}", width) for index, width in enumerate(hidden))
    with options.blaming("path"):
        data = table.load(
            options.text("path", path),
            kind=kind,
            standardise=options.switch("standardise", standardise),
            held_out=options.fraction("held_out", held_out, open_below=True),
            split_seed=options.whole("split_seed", split_seed, least=0),
        )
    model = MLP(widths=widths, outputs=data.outputs, dropout=options.fraction("dropout", dropout))
    classify = data.classes is not None

    def losses_and_scores(logits: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        if classify:
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return losses, logits.argmax(-1) == y
        return jnp.square(logits - y), jnp.abs(logits - y) * data.y_scale

    score = "accuracy" if classify else "mean_absolute_error"

    def create_state(key: jax.Array, tx: optax.GradientTransformation) -> jdist.TrainState:
        init_key, step_key = jax.random.split(key)
        params = model.init(init_key, jnp.zeros((1, data.train["x"].shape[1])))["params"]
        return jdist.TrainState.create(apply_fn=model.apply, params=params, tx=tx, rng=step_key)

    def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        key = jdist.replica_rng(jax.random.fold_in(state.rng, state.step))

        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = state.apply_fn({"params": params}, batch["x"], train=True, rngs={"dropout": key})
            losses, scores = losses_and_scores(logits, batch["y"])
            return jdist.mean(losses, batch["mask"]), scores

        (loss, scores), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, score: jdist.mean(scores, batch["mask"])}

    def eval_step(state: Any, batch: Any) -> dict[str, jax.Array]:
        logits = state.apply_fn({"params": state.params}, batch["x"])
        losses, scores = losses_and_scores(logits, batch["y"])
        return {"loss": jdist.mean(losses, batch["mask"]), score: jdist.mean(scores, batch["mask"])}

    return Task(
        create_state=create_state,
        train_step=train_step,
        eval_step=eval_step,
        train_data=lambda global_batch, seed, epochs: jdist.data.from_arrays(
            data.train, global_batch=global_batch, shuffle_seed=seed, epochs=epochs
        ),
        eval_data=lambda global_batch: jdist.data.from_arrays(data.test, global_batch=global_batch),
        baselines=lambda: {f"constant_{score}": table.constant_score(data)},
    )


class MLP(nn.Module):
    """Dense layers with ReLU between them; without hidden layers a linear model."""

    widths: tuple[int, ...]  # features of each hidden layer
    outputs: int  # classes, or numbers predicted
    dropout: float  # share of each hidden layer dropped in training

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        for width in self.widths:
            x = nn.relu(nn.Dense(width)(x))
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.outputs)(x)
