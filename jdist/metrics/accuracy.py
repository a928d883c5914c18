"""Accuracy, and top-k accuracy."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jdist.errors import StepError
from jdist.metrics.in_step import class_ids, class_labels, class_scores, real_numbers
from jdist.metrics.mean import mean_sums, of_mean
from jdist.metrics.metric import Metric
from jdist.support.checks import as_int, as_real

PyTree = Any


def accuracy(threshold: float | None = None) -> Metric:
    """Measures the fraction of rows whose label is predicted.

    `update(predictions, labels, mask=None)`, with integer labels of any shape [...]; every element counts as a row.

    Args:
        threshold: None: `predictions` are logits or probabilities [..., classes], the largest of which (the first, of equal
            ones) is taken; or class numbers [...]. A number: they are scores [...], and class 1 is predicted above it, 0.5 for
            probabilities, 0 for logits.

    Returns:
        The metric; its result is a float, of no rows NaN with a warning.

    Raises:
        StepError: `threshold` is no number.

    Example:
        >>> import jdist, jax.numpy as jnp
        >>> accuracy = jdist.metrics.accuracy(threshold=0.5)
        >>> accuracy.compute(accuracy.update(jnp.array([0.7, 0.2, 0.5]), jnp.array([1, 1, 0])))
        0.6666666666666666

    Source: `sklearn.metrics.accuracy_score`.
    """
    call = "jdist.metrics.accuracy"
    if threshold is not None and as_real(threshold) is None:
        raise StepError(
            f"{call}: `threshold` is {threshold!r}; it must be a number, 0.5 for probabilities or 0 for logits, or None where "
            "there is one score for each class."
        )

    def sums(predictions: Any, labels: Any, mask: Any = None) -> PyTree:
        labels = class_labels(call, labels)
        if threshold is None:
            return mean_sums(call, class_ids(call, predictions, labels) == labels, mask)
        scores = real_numbers(call, "`predictions`", predictions)
        if scores.shape != labels.shape:
            raise StepError(
                f"{call}(threshold={threshold}): `predictions` has shape {scores.shape}, `labels` has shape {labels.shape}; "
                "with a threshold there is one score for each label. Leave it out where there is one for each class; of a last "
                "axis of length 1 take `predictions[..., 0]`."
            )
        return mean_sums(call, (scores > threshold).astype(jnp.int32) == labels, mask)

    return of_mean("accuracy", sums)


def top_k(k: int) -> Metric:
    """Measures the fraction of rows whose label has one of the `k` highest scores; of equal scores the later class goes first.

    `update(predictions, labels, mask=None)`, with logits or probabilities [..., classes] and integer labels [...]. A label that
    is no class, or whose score is NaN, is never among them.

    Args:
        k: a positive integer.

    Returns:
        The metric; its result is a float, of no rows NaN with a warning.

    Raises:
        StepError: `k` is not a positive integer; when traced: it is larger than the number of classes.

    Example:
        >>> import jdist, jax.numpy as jnp
        >>> top_2 = jdist.metrics.top_k(2)
        >>> top_2.compute(top_2.update(jnp.array([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]), jnp.array([1, 2])))
        0.5

    Source: `sklearn.metrics.top_k_accuracy_score`, also for equal scores.
    """
    call = "jdist.metrics.top_k"
    if as_int(k, least=1) is None:
        raise StepError(f"{call}: `k` is {k!r}; it must be a positive integer, such as 5.")

    def sums(predictions: Any, labels: Any, mask: Any = None) -> PyTree:
        labels = class_labels(call, labels)
        scores = class_scores(call, predictions, labels)
        classes = scores.shape[-1]
        if k > classes:
            raise StepError(
                f"{call}: `k` is {k}, `predictions` has {classes} classes; take a `k` of at most {classes}."
            )
        own = jnp.take_along_axis(scores, jnp.clip(labels, 0, classes - 1)[..., None], -1)
        is_later = jnp.arange(classes) > labels[..., None]
        ahead = ((scores > own) | ((scores == own) & is_later)).sum(-1)
        is_class = (labels >= 0) & (labels < classes) & (own[..., 0] == own[..., 0])
        return mean_sums(call, (ahead < k) & is_class, mask)

    return of_mean("top_k", sums)
