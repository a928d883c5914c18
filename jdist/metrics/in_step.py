"""A metric's work inside a step: checks of its inputs, weights of its rows, and their gathering from the replicas."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jdist.core.per_replica import as_array, countable
from jdist.errors import StepError
from jdist.replica import collectives
from jdist.support.arrays import is_key, promote_types
from jdist.typing import PyTree


def all_rows(rows: PyTree) -> PyTree:
    """Gathers the rows of all replicas and microbatches, a pytree of arrays [rows], as a sum."""
    number, count = collectives.replica_id(), collectives.num_replicas()

    def placed(x: jax.Array) -> jax.Array:
        x = countable(x)
        return jax.lax.dynamic_update_slice(jnp.zeros(count * x.size, x.dtype), x, (number * x.size,))

    # Each replica adds its rows to zeros at its own place, which is exact.
    return collectives.all_reduce(jax.tree.map(placed, rows), "sum")


def weights(call: str, mask: Any, shape: tuple[int, ...]) -> jax.Array:
    """Computes the weight of each element of `shape`; the mask's shape is the beginning of it."""
    size, count = math.prod(shape), collectives.num_replicas()
    if size * count >= 2**31:
        raise StepError(
            f"{call}: a global batch has {size:,} x {count} elements, which 32 bits cannot count (2,147,483,647 at most). "
            "Evaluate in smaller global batches."
        )
    if mask is None:
        return jnp.ones(shape, jnp.int32)
    mask = real_numbers(call, "`mask`", mask)
    if mask.shape != shape[: mask.ndim]:
        raise StepError(
            f"{call}: `mask` has shape {mask.shape}, the values {shape}; the mask's shape must be the beginning of "
            "theirs, usually [rows]."
        )
    # Weights of bools and integers are int32, which is exact.
    is_exact = not jnp.issubdtype(mask.dtype, jnp.floating)
    mask = mask.astype(jnp.int32 if is_exact else promote_types(mask.dtype, jnp.float32))
    return jnp.broadcast_to(mask.reshape(mask.shape + (1,) * (len(shape) - mask.ndim)), shape)


def real_numbers(call: str, name: str, x: Any) -> jax.Array:
    """Converts an input to an array of real numbers or bools, else raises a `StepError`."""
    array = as_array(call, name, x)
    if is_key(array) or jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise StepError(f"{call}: {name} is {array.dtype}{list(array.shape)}; it must hold real numbers or bools.")
    return array


def class_labels(call: str, x: Any) -> jax.Array:
    """Converts an input of integers to class numbers, int32; raises a `StepError` for others."""
    labels = real_numbers(call, "`labels`", x)
    if jnp.issubdtype(labels.dtype, jnp.floating):
        raise StepError(
            f"{call}: `labels` is {labels.dtype}{list(labels.shape)}; class numbers are integers or bools. Write "
            "`labels.astype(int)`, of one-hot labels `labels.argmax(-1)`."
        )
    return labels.astype(jnp.int32)


def class_scores(call: str, scores: Any, labels: jax.Array) -> jax.Array:
    """Checks scores [..., classes] for labels [...]."""
    scores = real_numbers(call, "`predictions`", scores)
    if scores.shape[:-1] != labels.shape or scores.ndim != labels.ndim + 1:
        raise StepError(
            f"{call}: `predictions` has shape {scores.shape}, `labels` has shape {labels.shape}; logits have the labels' shape "
            "and one more axis, of classes."
        )
    if scores.shape[-1] < 2:
        raise StepError(
            f"{call}: `predictions` has shape {scores.shape}, of {scores.shape[-1]} classes; there must be 2 or more. For one "
            "score of the class 1 take `jdist.metrics.accuracy(threshold=...)` or `auc()`, with `predictions[..., 0]`."
        )
    return scores


def class_ids(call: str, predictions: Any, labels: jax.Array) -> jax.Array:
    """Finds the predicted classes, int32 of the labels' shape, of class numbers or of logits."""
    predictions = real_numbers(call, "`predictions`", predictions)
    if predictions.shape != labels.shape:
        return class_scores(call, predictions, labels).argmax(-1).astype(jnp.int32)
    if jnp.issubdtype(predictions.dtype, jnp.floating):
        raise StepError(
            f"{call}: `predictions` is {predictions.dtype}{list(predictions.shape)}, of the labels' shape, so it must hold "
            "class numbers, which are integers. Logits have one more axis, of classes. For one score of the class 1 take "
            "`jdist.metrics.accuracy(threshold=...)`; one-hot labels become class numbers by `labels.argmax(-1)`."
        )
    return predictions.astype(jnp.int32)
