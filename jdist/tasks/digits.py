"""Handwritten digits: 1,797 real images of 8 x 8 pixels that scikit-learn brings along, and a small CNN.

This file is also what a task of your own looks like: a model, a loss, data, and `make`, which the config
names.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jdist
from jdist.errors import ConfigError
from jdist.loop.task import Task
from jdist.tasks import options

# The split never changes, so that accuracies of different runs, seeds and machines can be compared.
SPLIT_SEED = 0
TEST_FRACTION = 0.2


@options.checked
def make(
    *,
    width: options.Count = 32,  # features of the first convolution; the second has twice as many, the hidden layer four times
    dropout: options.Fraction = 0.3,  # share of the hidden layer dropped in training
    shift: options.Natural = 1,  # training images are moved at random by up to so many pixels each way
) -> Task:
    """Makes the digits task: batches {"image": float32 [rows, 8, 8, 1] in [0, 1], "label": int32 [rows]}."""
    # 1,437 rows to train on and 360 to test, with the same share of each digit in both.
    train, test = load_split()
    return image_task(ConvNet(width, dropout, num_classes=10), train=train, test=test, shift=shift)


class ConvNet(nn.Module):
    """Two pairs of convolutions, each pair followed by a 2 x 2 maximum, then one hidden layer."""

    width: int  # features of the first pair
    dropout: float  # share of the hidden layer dropped in training
    num_classes: int

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
        x = images
        for features in (self.width, 2 * self.width):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(4 * self.width)(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.num_classes)(x)


def random_shift(key: jax.Array, images: jax.Array, *, most: int) -> jax.Array:
    """Moves each image by a random offset of at most `most` pixels; fills with 0."""
    if most == 0:
        return images
    padded = jnp.pad(images, ((0, 0), (most, most), (most, most), (0, 0)))
    corners = jax.random.randint(key, (images.shape[0], 2), 0, 2 * most + 1)

    def crop(image: jax.Array, corner: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(image, (corner[0], corner[1], 0), images.shape[1:])

    return jax.vmap(crop)(padded, corners)


def image_task(model: nn.Module, *, train: dict[str, np.ndarray], test: dict[str, np.ndarray], shift: int) -> Task:
    """Makes a classification task from a model and two sets of labelled images."""
    # `model(images, train=...)` returns logits [rows, classes]. The sets are {"image": [rows,
    # height, width, channels], "label": [rows]}. Metrics: "loss" (cross-entropy, nats), "accuracy".
    image_shape = (1, *train["image"].shape[1:])

    def create_state(key: jax.Array, tx: optax.GradientTransformation) -> jdist.TrainState:
        init_key, step_key = jax.random.split(key)
        params = model.init(init_key, jnp.zeros(image_shape))["params"]
        return jdist.TrainState.create(apply_fn=model.apply, params=params, tx=tx, rng=step_key)

    def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        key = jdist.replica_rng(jax.random.fold_in(state.rng, state.step))
        shift_key, dropout_key = jax.random.split(key)
        images = random_shift(shift_key, batch["image"], most=shift)

        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = state.apply_fn({"params": params}, images, train=True, rngs={"dropout": dropout_key})
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return jdist.mean(losses, batch["mask"]), logits

        (loss, logits), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state.params)
        correct = logits.argmax(-1) == batch["label"]
        metrics = {"loss": loss, "accuracy": jdist.mean(correct, batch["mask"])}
        return state.apply_gradients(grads=grads), metrics

    def eval_step(state: Any, batch: Any) -> dict[str, jax.Array]:
        logits = state.apply_fn({"params": state.params}, batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        correct = logits.argmax(-1) == batch["label"]
        return {"loss": jdist.mean(losses, batch["mask"]), "accuracy": jdist.mean(correct, batch["mask"])}

    return Task(
        create_state=create_state,
        train_step=train_step,
        eval_step=eval_step,
        train_data=lambda global_batch, seed, epochs: jdist.data.from_arrays(
            train, global_batch=global_batch, shuffle_seed=seed, epochs=epochs
        ),
        eval_data=lambda global_batch: jdist.data.from_arrays(test, global_batch=global_batch),
    )


def load_split() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Loads images and labels as `(train, test)`; the same split every time."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ConfigError(
            "The task `digits` takes its images from scikit-learn, which cannot be imported "
            f"({error}). Install it: pip install 'jdist[examples]'"
        ) from error
    digits: Any = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int32)
    parts: Any = train_test_split(images, labels, test_size=TEST_FRACTION, stratify=labels, random_state=SPLIT_SEED)
    return {"image": parts[0], "label": parts[2]}, {"image": parts[1], "label": parts[3]}
