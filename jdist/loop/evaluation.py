"""The evaluation that goes along with training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jdist.cluster.runtime import Runtime, alone
from jdist.core.host_sharded import map_leaves
from jdist.core.remote import shapes_of
from jdist.core.step_state import user_state
from jdist.core.strategy import Strategy
from jdist.data.dataset import DistributedDataset
from jdist.errors import DatasetError
from jdist.loop.data import Feed
from jdist.loop.metric_totals import Measured, Metrics, MetricTotals
from jdist.loop.preflight import names_of
from jdist.step.base import Distributed

PyTree = Any


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluates a state, called with it.

    Attributes:
        step: the evaluation step, distributed.
        feed: what to evaluate on.
        strategy: where to evaluate.
        trained_by: the strategy whose state it is.
        metrics: which of the results are contributions of metrics, as for `MetricTotals`.
    """

    step: Distributed
    feed: Feed
    strategy: Strategy
    trained_by: Strategy
    metrics: Metrics

    def __call__(self, state: PyTree) -> Measured:
        """What it measures of a state, by name."""
        own = state if self.strategy is self.trained_by else self.trained_by.fetch(state)
        return measure(self.step, own, self.feed.batches, self.strategy.cluster, self.metrics)

    def names(self, state: PyTree, *, depth: int) -> frozenset[str] | None:
        """The names of what it will measure; None where only a call shows them.

        Args:
            state: as training has it, or its shapes.
            depth: how many calls below the user's own this one is, for the place that warnings name.

        Raises:
            StepError: the step does not return what it should.
        """
        if self.strategy is not self.trained_by:  # what `fetch` would give
            state = map_leaves(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), user_state(shapes_of(state)))
        return names_of(self.step, state, self.feed, self.metrics, depth=depth + 1)


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
        metrics: as for `MetricTotals`.

    Returns:
        The results by name, the same on all processes: each batch weighs as many rows as it has.

    Raises:
        DatasetError: there is not one row.
    """
    cluster = cluster or alone()
    tally = MetricTotals(metrics)
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
