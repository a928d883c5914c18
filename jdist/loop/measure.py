"""Once through a data set with an evaluation step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jdist.cluster.runtime import Runtime, alone
from jdist.data.dataset import DistributedDataset
from jdist.errors import DatasetError
from jdist.loop.tally import Measured, Metrics, Tally

PyTree = Any


def measure(
    eval_step: Callable[[PyTree, PyTree], Mapping[str, Any]],
    state: PyTree,
    batches: Iterable[PyTree],
    cluster: Runtime | None = None,
    metrics: Metrics = None,
) -> Measured:
    """The means and metrics over all rows.

    Args:
        eval_step: `(state, batch) -> metrics` by name: scalars, each the mean over the rows of the batch that are no
            padding, and what metrics contribute.
        state: what to evaluate.
        batches: distributed batches, once through, from the beginning; the "mask" of a dict says which of its rows count.
        cluster: the processes that share the rows of each batch; None: this one alone.
        metrics: as for `Tally`.

    Returns:
        The results by name, the same on all processes: each batch weighs as many rows as it has.

    Raises:
        DatasetError: there is not one row.
    """
    cluster = cluster or alone()
    tally = Tally(metrics)
    with cluster.blocked():
        if isinstance(batches, DistributedDataset):
            batches.rewind()
        for batch in batches:
            tally.add(eval_step(state, batch), batch)
        measured, weight = tally.take(cluster=cluster)
    if math.isnan(weight) and not measured:
        raise DatasetError(
            "the rows of batches that the workers of a parameter server read are not known here, so scalars cannot be averaged "
            "over them. Return what `jdist.metrics` metrics contribute, or give arrays or a source of batches."
        )
    if not weight:
        raise DatasetError("the evaluation data has no rows; check where it comes from, and its mask")
    return measured
