"""The area under the ROC curve, exact: every row's score is kept."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jdist.errors import StepError
from jdist.metrics.in_step import all_rows, class_labels, real_numbers, weights
from jdist.metrics.mean import undefined
from jdist.metrics.metric import Metric
from jdist.support.arrays import promote_types, to_host

PyTree = Any
Rows = dict[str, np.ndarray]
_NAMES = {"score", "label", "weight"}


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
    """Copies the rows of a contribution that are no padding to the host."""
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
