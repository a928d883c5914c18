"""A model of Keras's own applications, such as MobileNet, on scikit-learn's digits: `stateless_call` in a step."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jdist
from jdist.tasks import Task, options

os.environ["KERAS_BACKEND"] = (
    "jax"  # before Keras is imported: another backend's models know nothing of JAX's gradients
)

import keras


def make(
    *,
    application: str = "MobileNet",
    weights: str | None = None,
    size: int = 64,
    dropout: float = 0.3,
    momentum: float = 0.9,
    seed: int = 0,
) -> Task:
    """Makes the task.

    Args:
        application: a model of `keras.applications`.
        weights: "imagenet", which Keras downloads, or a file; None: new ones.
        size: pixels of a side, to which the digits' 8 are enlarged.
        dropout: share of the features that is dropped before the last layer.
        momentum: of the averages of batch normalisation. With Keras's own 0.99 some hundred steps do not bring them to what
            the layers see: it predicts no better than a guess, under Keras's own `fit` as well.
        seed: of the new weights, which Keras draws.
    """
    if not callable(backbone := getattr(keras.applications, application, None)):
        raise options.OptionError("application", f"{application!r} is not a model of keras.applications")
    keras.utils.set_random_seed(seed)
    features = backbone(weights=weights, include_top=False, pooling="avg", input_shape=(size, size, 3))
    for layer in features.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = momentum
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Resizing(size, size),
            features,
            keras.layers.Dropout(dropout),
            keras.layers.Dense(10),
        ]
    )
    accuracy = jdist.metrics.accuracy()
    digits = load_digits()
    images = np.repeat(digits.images[..., None] / 8 - 1, 3, axis=-1)
    data = {"image": images.astype(np.float32), "label": digits.target.astype(np.int32)}
    train, test = ({name: x[at] for name, x in data.items()} for at in (slice(1437), slice(1437, None)))

    def create_state(key, tx):
        return jdist.TrainState.create(
            params=[variable.value for variable in model.trainable_variables],
            tx=tx,
            non_trainable=[variable.value for variable in model.non_trainable_variables],
        )

    def train_step(state, batch):
        old = state.extra["non_trainable"]
        # Each replica has its own seed, so that its rows have dropout masks of their own.
        own = [x.at[0].add(jdist.replica_id().astype(x.dtype)) if is_seed(x) else x for x in old]

        def loss_fn(params):
            logits, new = model.stateless_call(params, own, batch["image"], training=True)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return jdist.mean(losses, batch["mask"]), new

        (loss, new), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state.params)
        # Running statistics are averaged over the replicas; of a seed only what was drawn is counted.
        pairs = zip(old, new, strict=True)
        new = [x.at[1].set(y[1]) if is_seed(x) else jdist.all_reduce(y, "mean") for x, y in pairs]
        return state.apply_gradients(grads=grads, non_trainable=new), {"loss": loss}

    def eval_step(state, batch):
        logits, _ = model.stateless_call(state.params, state.extra["non_trainable"], batch["image"], training=False)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        right = accuracy.update(logits, batch["label"], batch["mask"])
        return {"loss": jdist.mean(losses, batch["mask"]), "accuracy": right}

    return Task(
        create_state=create_state,
        train_step=train_step,
        eval_step=eval_step,
        train_data=lambda global_batch, seed, epochs: jdist.data.from_arrays(
            train, global_batch=global_batch, shuffle_seed=seed, epochs=epochs
        ),
        eval_data=lambda global_batch: jdist.data.from_arrays(test, global_batch=global_batch),
        metrics={"accuracy": accuracy},
        baselines=lambda: {"accuracy of a guess": 0.1},
    )


def is_seed(value: jax.Array) -> bool:
    """Whether a non-trainable variable is a SeedGenerator's: the seed, and how often it was drawn from."""
    return value.dtype == jnp.uint32
