"""Metrics of classes: accuracy and top-k accuracy; the confusion matrix, precision, recall and F1; the area under the ROC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from jdist.errors import StepError
from jdist.metrics.in_step import all_rows, class_ids, class_labels, class_scores, real_numbers, weights
from jdist.metrics.metric import Metric, mean_sums, of_mean, of_sums, undefined
from jdist.support import checks
from jdist.support.arrays import promote_types, to_host
from jdist.typing import PyTree

Average = Literal["macro", "micro", "weighted", "binary"]
Rows = dict[str, np.ndarray]
_NAMES = {"score", "label", "weight"}  # of the rows of `auc`


def accuracy(threshold: float | None = None) -> Metric:
    """Measures the fraction of rows with their label predicted.

    `update(predictions, labels, mask=None)`, with integer labels of any shape [...]; every element counts as a row.

    Args:
        threshold: None: `predictions` are logits or probabilities [..., classes], and the largest (the first, of equal
            ones) is taken; or class numbers [...]. A number: they are scores [...], and class 1 is predicted above it, 0.5 for
            probabilities, 0 for logits.

    Returns:
        The metric; its result is a float, of no rows NaN with a warning.

    Raises:
        StepError: `threshold` is not a number.

    Example:
        >>> import jdist, jax.numpy as jnp
        >>> accuracy = jdist.metrics.accuracy(threshold=0.5)
        >>> accuracy.compute(accuracy.update(jnp.array([0.7, 0.2, 0.5]), jnp.array([1, 1, 0])))
        0.6666666666666666

    Source: `sklearn.metrics.accuracy_score`.
    """
    call = "jdist.metrics.accuracy"
    if threshold is not None:
        fix = "Give 0.5 for probabilities or 0 for logits, or None where there is one score for each class."
        checks.real_number("threshold", threshold, StepError, call=call, fix=fix)

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
    """Measures the fraction of rows with a label among the `k` highest scores; of equal scores the later class goes first.

    `update(predictions, labels, mask=None)`, with logits or probabilities [..., classes] and integer labels [...]. A label that
    is not a class, or has a NaN score, is never among them.

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
    k = checks.whole_number("k", k, StepError, call=call)

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


def confusion_matrix(num_classes: int) -> Metric:
    """Counts the rows of each class by the class that is predicted.

    `update(predictions, labels, mask=None)`, with integer labels [...] and logits [..., classes] or class numbers [...]; every
    element counts as a row.

    Args:
        num_classes: a positive integer.

    Returns:
        The metric; its result is an array [labels, predictions], int64, or float64 if the mask holds fractions.

    Raises:
        StepError: `num_classes` is not a positive integer; in `compute`: a row that counts has a label or prediction outside of
            the classes.

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
    """Measures the fraction of the rows of a class that are predicted as it; the result is as that of `precision`.

    Args:
        num_classes: a positive integer.
        average: as in `precision`: "macro", "weighted", "micro", "binary" or None.

    Source: `sklearn.metrics.recall_score` with `labels=range(num_classes), zero_division=0`.
    """
    return _score("recall", num_classes, average, lambda right, predicted, labelled: (right, labelled))


def f1(num_classes: int, average: Average | None = "macro") -> Metric:
    """Computes the harmonic mean of precision and recall; the result is as that of `precision`.

    Args:
        num_classes: a positive integer.
        average: as in `precision`: "macro", "weighted", "micro", "binary" or None.

    Source: `sklearn.metrics.f1_score` with `labels=range(num_classes), zero_division=0`.
    """
    return _score("f1", num_classes, average, lambda right, predicted, labelled: (2 * right, predicted + labelled))


def _from_matrix(name: str, num_classes: int, compute: Callable[[np.ndarray], Any]) -> Metric:
    call = f"jdist.metrics.{name}"
    fix = "It is one more than the largest label."
    n = checks.whole_number("num_classes", num_classes, StepError, call=call, fix=fix)

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
                f"{call}: rows of weight {total['outside']} have a label or a prediction outside of the {n} classes "
                f"0 to {n - 1}. Set `num_classes`, or leave such rows out by the mask: `mask & (labels >= 0)`."
            )
        return compute(total["matrix"])

    return of_sums(name, sums, checked, zero={"matrix": np.zeros((n, n), np.int64), "outside": 0})


def _score(name: str, num_classes: int, average: Average | None, parts: Callable[..., tuple[Any, Any]]) -> Metric:
    """Makes a metric of quotients; `parts` computes their numerators and denominators from the counts of each class."""
    call = f"jdist.metrics.{name}"
    checks.choice("average", average, (*get_args(Average), None), StepError, call=call)
    if average == "binary" and num_classes != 2:
        other = '"macro", "micro" or "weighted"'
        raise StepError(f'{call}: `average` is "binary", and `num_classes` is {num_classes!r}, not 2. Take {other}.')

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


def auc() -> Metric:
    """Measures the area under the ROC curve: how often class 1 has a higher score than class 0; equal ones count half.

    `update(scores, labels, mask=None)`, with a score for class 1 (a logit or probability) and a label 0 or 1 for each row, both
    of one shape [...]; every element counts as a row. Each step gathers the scores, labels and weights of its global batch,
    and a total keeps them, 12 bytes a row.

    Returns:
        The metric; its result is a float. It is NaN, with a warning, if rows of one class alone count or a score is NaN.

    Raises:
        StepError: in `compute`, a label is neither 0 nor 1.

    Example:
        >>> import jdist, jax.numpy as jnp
        >>> auc = jdist.metrics.auc()
        >>> auc.compute(auc.update(jnp.array([0.9, 0.4, 0.4, 0.1]), jnp.array([1, 1, 0, 0])))
        0.875

    Source: `sklearn.metrics.roc_auc_score` of binary labels.
    """
    call = "jdist.metrics.auc"

    def update(scores: Any, labels: Any, mask: Any = None) -> PyTree:
        scores, labels = real_numbers(call, "`scores`", scores), class_labels(call, labels)
        if scores.shape != labels.shape:
            raise StepError(
                f"{call}: `scores` has shape {scores.shape}, `labels` has shape {labels.shape}; there is one score, for class "
                "1, for each label. Of two logits a row take `logits[..., 1] - logits[..., 0]`."
            )
        if jnp.issubdtype(scores.dtype, jnp.floating):
            scores = scores.astype(promote_types(scores.dtype, jnp.float32))
        rows = {"score": scores, "label": labels, "weight": weights(call, mask, labels.shape)}
        # A tuple of one, so that contributions and totals are added by concatenation.
        return (all_rows({name: x.reshape(-1) for name, x in rows.items()}),)

    def add(total: PyTree, contribution: PyTree) -> PyTree:
        return (*total, *_real_rows(contribution))

    return Metric(name="auc", update=update, zero=(), add=add, compute=lambda total: _area(_real_rows(total)))


def _real_rows(contribution: Any) -> tuple[Rows, ...]:
    """Copies the rows of a contribution to the host, without padding."""
    if not isinstance(contribution, tuple) or not all(
        isinstance(rows, dict) and rows.keys() == _NAMES for rows in contribution
    ):
        raise StepError(
            f"jdist.metrics.auc: a contribution is a {type(contribution).__name__}; it must be what `update` returned, out of "
            "a step's metrics. Of what `strategy.run` returned take one version: `result.local_results()[0]`."
        )
    chunks = []
    for rows in contribution:
        flat = {name: to_host(x).reshape(-1) for name, x in rows.items()}
        chunks.append({name: x[flat["weight"] != 0] for name, x in flat.items()})
    return tuple(chunks)


def _area(chunks: tuple[Rows, ...]) -> float:
    score, label, weight = (
        np.concatenate([np.zeros(0), *(rows[name] for rows in chunks)]) for name in ("score", "label", "weight")
    )
    wrong = sorted(set(np.unique(label).tolist()) - {0.0, 1.0})
    if wrong:
        named = ", ".join(f"{x:g}" for x in wrong[:5]) + ", ..." * (len(wrong) > 5)
        raise StepError(
            f"jdist.metrics.auc: there are labels {named}; they must be 0 or 1. For one class of several write "
            "`labels == number`; leave rows out by the mask."
        )
    # How many rows of each class have each of the scores; then those of class 0 that are below.
    _, place = np.unique(score, return_inverse=True)
    positive, negative = np.bincount(place, weight * label), np.bincount(place, weight * (1 - label))
    all_pairs = positive.sum() * negative.sum()
    num_nan = np.isnan(score).sum()
    if num_nan or all_pairs == 0:
        no_pair = "the rows are of one class alone" if score.size else "no row counts"
        undefined("auc", f"{num_nan} of {score.size} scores are NaN" if num_nan else no_pair)
        return float("nan")
    below = np.cumsum(negative) - negative
    return float(positive @ (below + negative / 2) / all_pairs)
