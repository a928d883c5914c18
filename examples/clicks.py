"""A model of clicks, DLRM (arXiv:1906.00091): embeddings of categories and a small network, for parameter servers.

The data has the shape of Criteo's: 13 counts and 26 categories a row. `files` are tab-separated as Criteo's are (label, counts,
categories as hexadecimal hashes), in parts that fit into memory; without it rows are drawn from a model that is known.
"""

from __future__ import annotations

import glob
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from pydantic import Field

import jdist
from jdist.tasks import Task, options

COUNTS, CATEGORIES = 13, 26


class Clicks(nn.Module):
    """A row's logit: a network over its counts, and products of embeddings.

    Attributes:
        buckets: rows of each category's embedding table; a category's hash is taken modulo this.
        width: features of an embedding.
        hidden: widths of the last network's hidden layers.
    """

    buckets: int
    width: int
    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, counts: jax.Array, categories: jax.Array) -> jax.Array:
        scale = nn.initializers.normal(self.width**-0.5)
        tables = self.param("embeddings", scale, (CATEGORIES, self.buckets, self.width))
        # [rows, categories, width]
        embedded = tables[jnp.arange(CATEGORIES), categories % self.buckets]
        x = nn.relu(nn.Dense(64)(jnp.log1p(jnp.maximum(counts, 0))))
        x = nn.relu(nn.Dense(self.width)(x))
        vectors = jnp.concatenate([x[:, None], embedded], axis=1)
        products = jnp.einsum("bij,bkj->bik", vectors, vectors)
        first, second = jnp.triu_indices(CATEGORIES + 1, 1)
        x = jnp.concatenate([x, products[:, first, second]], axis=1)
        for width in self.hidden:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(1)(x)[:, 0]


def make(
    *,
    files: str | None = None,
    rows: Annotated[int, Field(ge=100)] = 500_000,
    buckets: options.Count = 1000,
    width: options.Count = 16,
    held_out: options.Fraction = 0.1,
) -> Task:
    """Makes the task.

    Args:
        files: glob pattern of Criteo's files, the last of them held out; None: `rows` rows are drawn.
        rows: how many rows to draw.
        buckets: rows of each of the 26 embedding tables.
        width: features of an embedding.
        held_out: share of the drawn rows to evaluate on.
    """
    model = Clicks(buckets, width, (256, 64))
    auc = jdist.metrics.auc()
    if files is None:
        drawn = draw(rows)
        cut = int(len(drawn["click"]) * (1 - held_out))
        train, test = ({name: x[at] for name, x in drawn.items()} for at in (slice(cut), slice(cut, None)))
    else:
        paths = sorted(glob.glob(files))
        if len(paths) < 2:
            raise options.OptionError(
                "files", f"{files!r} matches {len(paths)} files: two or more are needed, one is held out"
            )

    def create_state(key, tx):
        counts, categories = jnp.zeros((1, COUNTS)), jnp.zeros((1, CATEGORIES), jnp.uint32)
        params = model.init(key, counts, categories)["params"]
        return jdist.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def logits_and_losses(state, params, batch):
        logits = state.apply_fn({"params": params}, batch["counts"], batch["categories"])
        return logits, optax.sigmoid_binary_cross_entropy(logits, batch["click"])

    def train_step(state, batch):
        def loss_fn(params):
            return jdist.mean(logits_and_losses(state, params, batch)[1], batch["mask"])

        loss, grads = jdist.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    def eval_step(state, batch):
        logits, losses = logits_and_losses(state, state.params, batch)
        area = auc.update(logits, batch["click"] > 0.5, batch["mask"])
        return {"loss": jdist.mean(losses, batch["mask"]), "auc": area}

    def train_data(global_batch, seed, epochs):
        if files is None:
            return jdist.data.from_arrays(train, global_batch=global_batch, shuffle_seed=seed, epochs=epochs)
        order = {"shuffle_seed": seed, "epochs": epochs}
        return jdist.data.from_files(paths[:-1], read, global_batch=global_batch, workers=2, **order)

    def eval_data(global_batch):
        if files is None:
            return jdist.data.from_arrays(test, global_batch=global_batch)
        return jdist.data.from_files(paths[-1:], read, global_batch=global_batch)

    return Task(
        create_state=create_state,
        train_step=train_step,
        eval_step=eval_step,
        train_data=train_data,
        eval_data=eval_data,
        metrics={"auc": auc},
        baselines=lambda: {"AUC of a guess": 0.5},
    )


def draw(rows: int) -> dict[str, np.ndarray]:
    """Draws rows with clicks that depend on counts, on categories, and on pairs of these."""
    rng = np.random.default_rng(0)
    counts = rng.poisson(3.0, (rows, COUNTS)).astype(np.float32)
    categories = rng.zipf(1.3, (rows, CATEGORIES)).astype(np.uint32) % 1000
    taste = rng.normal(size=(CATEGORIES, 1000)) * 0.5
    of_category = taste[np.arange(CATEGORIES), categories]
    logit = of_category.sum(1) / 2 + of_category[:, 0] * of_category[:, 1] + 0.2 * (counts[:, 0] - 3) - 1
    click = rng.random(rows) < 1 / (1 + np.exp(-logit))
    return {"counts": counts, "categories": categories, "click": click.astype(np.float32)}


def read(path: str) -> dict[str, np.ndarray]:
    """Reads one of Criteo's files; an empty count is 0, an empty category is category 0."""
    with open(path, encoding="ascii") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    counts = np.array([[float(x or 0) for x in row[1 : 1 + COUNTS]] for row in rows], np.float32)
    categories = np.array([[int(x or "0", 16) for x in row[1 + COUNTS :]] for row in rows], np.uint32)
    return {"counts": counts, "categories": categories, "click": np.array([float(row[0]) for row in rows], np.float32)}
