"""Losses divided by the global batch, as `tf.nn` has them, for `jdist.value_and_grad(..., op="sum")`.

`jdist.mean` with `op="mean"`, the default, needs neither and knows of padding. These are for steps that come from
`tf.distribute`, where each replica's loss is its part of a sum.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jdist.core import context
from jdist.core.per_replica import as_array, check_numbers
from jdist.errors import StepError
from jdist.replica import collectives
from jdist.support.arrays import promote_types
from jdist.support.checks import as_int
from jdist.support.tensorflow_names import without_tensorflow_keywords


@without_tensorflow_keywords
def compute_average_loss(
    per_example_loss: jax.Array, sample_weight: jax.Array | float | None = None, global_batch: int | None = None
) -> jax.Array:
    """Computes this replica's part of the average loss: the sum of its losses over the rows of the global batch.

    The parts add up to the average, so gradients are summed: `jdist.value_and_grad(loss_fn, op="sum")`.

    Args:
        per_example_loss: shape [rows, ...].
        sample_weight: weights of the rows: a scalar, or of a shape with which `per_example_loss`'s begins.
        global_batch: number of rows of the global batch; None: this replica's rows times the number of replicas (and of
            microbatches), padding included.

    Returns:
        A scalar, float32 or wider. No rows, and a traced `global_batch` of 0, give 0, as in TensorFlow: a replica
        without rows adds nothing to the sum.

    Raises:
        StepError: the losses are not numbers or are one scalar, the weights do not fit, `global_batch` is not a positive
            integer, or it is missing outside a step within a strategy's scope, where the number of replicas at work is
            not known.

    Example:
        >>> import jdist, jax.numpy as jnp
        >>> float(jdist.compute_average_loss(jnp.array([1.0, 2.0]), global_batch=3))
        1.0

    Source: `tf.nn.compute_average_loss`.
    """
    losses = _numbers("compute_average_loss", "per_example_loss", per_example_loss)
    losses = losses.astype(promote_types(losses.dtype, jnp.float32))
    if losses.ndim == 0:
        raise StepError(
            "jdist.compute_average_loss: `per_example_loss` is one scalar; it must hold one loss for each row, shape "
            "[rows, ...]. For a regularisation loss there is `jdist.scale_regularization_loss`."
        )
    if sample_weight is not None:
        weights = _numbers("compute_average_loss", "sample_weight", sample_weight)
        if weights.shape != losses.shape[: weights.ndim]:
            raise StepError(
                f"jdist.compute_average_loss: `sample_weight` has shape {weights.shape}, `per_example_loss` has shape "
                f"{losses.shape}; the weights' shape must be the beginning of the losses' shape, usually [rows]."
            )
        losses = losses * weights.reshape(weights.shape + (1,) * (losses.ndim - weights.ndim))
    if global_batch is None:
        rows = losses.shape[0] * _num_replicas("compute_average_loss")
    else:
        rows = _checked_rows(global_batch)
    total = losses.sum()
    if not isinstance(rows, jax.Array):
        return total / max(rows, 1)
    return jnp.where(rows == 0, 0, total / jnp.where(rows == 0, 1, rows))  # twice, so that the gradient stays finite


def scale_regularization_loss(regularization_loss: jax.Array | float) -> jax.Array:
    """Divides a loss that every replica computes alike by the number of replicas.

    The parts are summed again by `jdist.value_and_grad(..., op="sum")`; with "mean" there is nothing to scale.

    Args:
        regularization_loss: of any shape; summed.

    Returns:
        A scalar, float32 or wider.

    Raises:
        StepError: the loss is not a number, or it was called outside a step within a strategy's scope.

    Example:
        >>> import jdist
        >>> float(jdist.scale_regularization_loss(4.0))
        4.0

    Source: `tf.nn.scale_regularization_loss`.
    """
    loss = _numbers("scale_regularization_loss", "regularization_loss", regularization_loss)
    loss = loss.astype(promote_types(loss.dtype, jnp.float32))
    return loss.sum() / _num_replicas("scale_regularization_loss")


def _num_replicas(call: str) -> int:
    """Counts the parts in which a step's loss is computed."""
    if not context.in_replica_context():
        raise StepError(
            f"jdist.{call} was called within `strategy.scope()` but outside a step, where no replica computes. Call it in a "
            "distributed step or in `strategy.run`."
        )
    return collectives.num_replicas()


def _numbers(call: str, name: str, x: Any) -> jax.Array:
    array = as_array(f"jdist.{call}", f"`{name}`", x)
    check_numbers(f"jdist.{call}", "sum", array)
    return array


def _checked_rows(global_batch: Any) -> Any:
    if isinstance(global_batch, jax.Array):
        if global_batch.ndim == 0 and jnp.issubdtype(global_batch.dtype, jnp.integer):
            return global_batch  # its sign is known when the step runs
    elif (rows := as_int(global_batch, least=1)) is not None:
        return rows
    raise StepError(
        f"jdist.compute_average_loss: `global_batch` is {global_batch!r}; it must be a positive integer, the number of rows "
        "that all replicas hold together."
    )
