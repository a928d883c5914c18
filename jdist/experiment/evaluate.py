"""Exact means of metrics over a data set, whatever the sizes of its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jdist.cluster.runtime import Runtime, alone
from jdist.errors import DatasetError
from jdist.global_arrays import local_rows

PyTree = Any
_EXCHANGE_S = 600.0


def evaluate(
    eval_step: Callable[[PyTree, PyTree], Mapping[str, Any]],
    state: PyTree,
    batches: Iterable[PyTree],
    cluster: Runtime | None = None,
) -> dict[str, float]:
    """The mean of each metric over all rows.

    Args:
        eval_step: `(state, batch) -> metrics`, each the mean over the rows of the batch that are no padding.
        state: what to evaluate.
        batches: distributed batches, once through; the "mask" of a dict says which of its rows count.
        cluster: the processes that share the rows of each batch; None: this one alone.

    Returns:
        The means by name, the same on all processes: each batch weighs as many rows as it has.

    Raises:
        DatasetError: there is not one row.
    """
    cluster = cluster or alone()
    with cluster.blocked():
        results = []
        for batch in batches:
            metrics = eval_step(state, batch)
            mask = batch["mask"] if isinstance(batch, Mapping) and "mask" in batch else None
            results.append((metrics, len(jax.tree.leaves(batch)[0]) if mask is None else mask))
        # Of rows that are spread over processes each weighs its own, and their sums are added up.
        rows = np.array([np.sum(local_rows(weight)) for _, weight in results], np.float64)
        values = [{name: float(value) for name, value in jax.device_get(dict(m)).items()} for m, _ in results]
        sums = {name: float(np.dot(rows, [v[name] for v in values])) for name in values[0]} if values else {}
        said = cluster.exchange("an evaluation", [float(rows.sum()), sums], _EXCHANGE_S)
    total = sum(count for count, _ in said)
    if total == 0:
        raise DatasetError("the evaluation data has no rows; check the task's `eval_data`")
    return loss_first({name: sum(part[name] for _, part in said) / total for name in sums})


def loss_first(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics in the order to show them in: JAX hands dicts back sorted by name."""
    return dict(sorted(metrics.items(), key=lambda item: item[0] != "loss"))
