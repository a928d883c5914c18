"""Exact means of metrics over a data set, whatever the sizes of its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jdist.errors import DatasetError

PyTree = Any


def evaluate(
    eval_step: Callable[[PyTree, PyTree], Mapping[str, Any]], state: PyTree, batches: Iterable[PyTree]
) -> dict[str, float]:
    """The mean of each metric over all rows.

    Args:
        eval_step: `(state, batch) -> metrics`, each the mean over the rows of the batch that are no padding.
        state: what to evaluate.
        batches: distributed batches, once through; the "mask" of a dict says which of its rows count.

    Returns:
        The means by name: each batch weighs as many rows as it has.

    Raises:
        DatasetError: there is not one row.
    """
    results = []
    for batch in batches:
        metrics = eval_step(state, batch)
        mask = batch["mask"] if isinstance(batch, Mapping) and "mask" in batch else None
        results.append((metrics, len(jax.tree.leaves(batch)[0]) if mask is None else mask))
    rows = np.array([np.sum(jax.device_get(weight)) for _, weight in results], np.float64)
    if rows.sum() == 0:
        raise DatasetError("the evaluation data has no rows; check the task's `eval_data`")
    values = [{name: float(value) for name, value in jax.device_get(dict(m)).items()} for m, _ in results]
    return loss_first({name: float(np.dot(rows, [v[name] for v in values]) / rows.sum()) for name in values[0]})


def loss_first(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics in the order to show them in: JAX hands dicts back sorted by name."""
    return dict(sorted(metrics.items(), key=lambda item: item[0] != "loss"))
