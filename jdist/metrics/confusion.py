"""The confusion matrix, and precision, recall and F1 of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from jdist.errors import StepError
from jdist.metrics.in_step import class_ids, class_labels, weights
from jdist.metrics.metric import Metric
from jdist.metrics.sums import of_sums
from jdist.support.checks import as_int
from jdist.support.suggest import did_you_mean

PyTree = Any
Average = Literal["macro", "micro", "weighted", "binary"]


def confusion_matrix(num_classes: int) -> Metric:
    """Counts the rows of each class by the class that is predicted.

    `update(predictions, labels, mask=None)`, with integer labels [...] and logits [..., classes] or class numbers [...]; every
    element counts as a row.

    Args:
        num_classes: a positive integer.

    Returns:
        The metric; its result is an array [labels, predictions], int64, or float64 if the mask holds fractions.

    Raises:
        StepError: `num_classes` is not a positive integer; in `compute`: a row that counts has a label or prediction that is no
            class.

    Example:
        >>> import jdist, jax.numpy as jnp
        >>> confusion = jdist.metrics.confusion_matrix(2)
        >>> confusion.compute(confusion.update(jnp.array([0, 1, 1]), jnp.array([0, 0, 1]))).tolist()
        [[1, 1], [0, 1]]

    Source: `sklearn.metrics.confusion_matrix` with `labels=range(num_classes)`.
    """
    return _from_matrix("confusion_matrix", num_classes, lambda matrix: matrix)


def precision(num_classes: int, average: Average | None = "macro") -> Metric:
    """Measures the fraction of the rows predicted as a class that are of it; for `update` see `confusion_matrix`.

    Args:
        num_classes: a positive integer.
        average: "macro", the mean over classes; "weighted", weighted by the rows of each class; "micro", of all rows together;
            "binary", that of class 1 of two; None: that of each class.

    Returns:
        The metric; its result is a float, or an array [num_classes]. A class without such rows has 0.

    Raises:
        StepError: `num_classes` or `average` is not allowed.

    Example:
        >>> import jdist, jax.numpy as jnp
        >>> precision = jdist.metrics.precision(2, average="binary")
        >>> precision.compute(precision.update(jnp.array([0, 1, 1]), jnp.array([0, 0, 1])))
        0.5

    Source: `sklearn.metrics.precision_score` with `labels=range(num_classes), zero_division=0`.
    """
    return _score("precision", num_classes, average, lambda right, predicted, labelled: (right, predicted))


def recall(num_classes: int, average: Average | None = "macro") -> Metric:
    """Measures the fraction of the rows of a class that are predicted as it; arguments and result as of `precision`.

    Source: `sklearn.metrics.recall_score` with `labels=range(num_classes), zero_division=0`.
    """
    return _score("recall", num_classes, average, lambda right, predicted, labelled: (right, labelled))


def f1(num_classes: int, average: Average | None = "macro") -> Metric:
    """Computes the harmonic mean of precision and recall; arguments and result as of `precision`.

    Source: `sklearn.metrics.f1_score` with `labels=range(num_classes), zero_division=0`.
    """
    return _score("f1", num_classes, average, lambda right, predicted, labelled: (2 * right, predicted + labelled))


def _from_matrix(name: str, num_classes: int, compute: Callable[[np.ndarray], Any]) -> Metric:
    call = f"jdist.metrics.{name}"
    n = as_int(num_classes, least=1)
    if n is None:
        raise StepError(
            f"{call}: `num_classes` is {num_classes!r}; it must be a positive integer, one more than the largest label."
        )

    def sums(predictions: Any, labels: Any, mask: Any = None) -> PyTree:
        labels = class_labels(call, labels)
        ids = class_ids(call, predictions, labels)
        weight = weights(call, mask, labels.shape)
        is_class = (labels >= 0) & (labels < n) & (ids >= 0) & (ids < n)
        # One cell more, for rows of other classes.
        cell = jnp.where(is_class, labels * n + ids, n * n).reshape(-1)
        cells = jnp.zeros(n * n + 1, weight.dtype).at[cell].add(weight.reshape(-1))
        return {"matrix": cells[:-1].reshape(n, n), "outside": cells[-1]}

    def checked(total: PyTree) -> Any:
        if total["outside"] != 0:
            raise StepError(
                f"{call}: rows of weight {total['outside']} have a label or a prediction that is none of the {n} classes "
                f"0 to {n - 1}. Set `num_classes`, or leave such rows out by the mask: `mask & (labels >= 0)`."
            )
        return compute(total["matrix"])

    return of_sums(name, sums, checked, zero={"matrix": np.zeros((n, n), np.int64), "outside": 0})


def _score(name: str, num_classes: int, average: Average | None, parts: Callable[..., tuple[Any, Any]]) -> Metric:
    """Makes a metric of quotients; `parts` computes their numerators and denominators from the counts of each class."""
    call = f"jdist.metrics.{name}"
    if average is not None and average not in get_args(Average):
        raise StepError(
            f"{call}: `average` is {average!r}; allowed are {', '.join(map(repr, get_args(Average)))} and None."
            f"{did_you_mean(average, get_args(Average))}"
        )
    if average == "binary" and num_classes != 2:
        raise StepError(
            f'{call}: `average` is "binary", which is for 2 classes, and `num_classes` is {num_classes!r}. Take "macro", '
            '"micro" or "weighted".'
        )

    def compute(matrix: np.ndarray) -> Any:
        right, predicted, labelled = np.diag(matrix), matrix.sum(0), matrix.sum(1)
        if average == "micro":
            return float(_quotients(*parts(right.sum(), predicted.sum(), labelled.sum())))
        scores = _quotients(*parts(right, predicted, labelled))
        if average == "macro":
            return float(scores.mean())
        if average == "weighted":
            return float(_quotients(scores @ labelled, labelled.sum()))
        return scores if average is None else float(scores[1])

    return _from_matrix(name, num_classes, compute)


def _quotients(numerators: Any, denominators: Any) -> np.ndarray:
    """Divides; 0 where the denominator is 0."""
    return np.where(denominators == 0, 0.0, numerators / np.where(denominators == 0, 1, denominators))
