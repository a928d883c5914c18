"""Evaluation and prediction, once through a data set, under any strategy; and the evaluation of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jdist.cluster.runtime import Runtime, alone
from jdist.core.remote import shapes_of
from jdist.core.sharded_leaf import map_leaves
from jdist.core.step_state import user_state
from jdist.core.strategy import Strategy
from jdist.data.dataset import DistributedDataset
from jdist.errors import DatasetError, StepError
from jdist.loop.data import Feed, open_feed
from jdist.loop.keras_hints import with_hints
from jdist.loop.metric_totals import Measured, Metrics, MetricTotals
from jdist.loop.steps import eval_step_of, metrics_of, names_of, strategy_of
from jdist.metrics import Metric
from jdist.step.base import Distributed
from jdist.step.options import Verify, check_verify
from jdist.support.arrays import to_host
from jdist.support.words import did_you_mean
from jdist.typing import PyTree

_AHEAD = 8  # batches with results that may wait to be read


@with_hints
def evaluate(
    step: Any,
    state: PyTree,
    data: Any,
    *,
    strategy: Strategy | None = None,
    global_batch: int | None = None,
    metrics: Mapping[str, Metric] | Metric | None = None,
    verify: Verify = "first",
) -> dict[str, Any]:
    """Evaluates a state on a data set; each row counts once, whatever the batches.

    Args:
        step: `(state, batch) -> metrics` of one replica's slice of the batch, distributed already or not; or a
            `jdist.tasks.Task`. It returns scalars by name, each the `jdist.mean` over the rows, and contributions of `metrics`.
        state: laid out by the strategy, or on the host.
        data: arrays, a source of batches, or a distributed dataset, as for `jdist.fit`; gone through once.
        strategy: where it runs; None: the step's own, else the current one.
        global_batch: rows of a step, if `data` is arrays.
        metrics: the metrics of `jdist.metrics` that the step returns contributions to, as for `jdist.fit`; None: the task's.
        verify: compares the first batch's results with those of one replica, once for each step, as for `jdist.fit`.

    Returns:
        The results by name, the loss first; the same on all processes.

    Raises:
        StepError: `step` is not a step, or returns something else.
        DatasetError: `data` has no rows, or is not data.
        VerificationError: the results are others than on one replica, and `verify` is "strict".

    Warns:
        VerificationWarning: the results are others than on one replica, and `verify` is "first".
        UserWarning: the step never reads the mask, and batches of the arrays are filled up.

    Example:
        >>> import jdist, numpy as np
        >>> def eval_step(w, batch):
        ...     return {"loss": jdist.mean((w * batch["x"] - 2.0) ** 2, batch["mask"])}
        >>> jdist.evaluate(eval_step, 0.5, {"x": np.arange(5, dtype=np.float32)}, global_batch=2)
        {'loss': 1.5}
    """
    strategy = strategy_of(step, strategy, state)
    eval_step = eval_step_of(step, strategy, call="jdist.evaluate")
    feed = open_feed(data, strategy, global_batch=global_batch, batch_axis=eval_step.options.batch_axis)
    wanted = metrics_of(step, metrics)
    check_verify(verify)
    eval_step.verify_next(verify, pads=feed.pads)
    if feed.pads:
        state = eval_step.prepare(state, feed.batches.element_spec)
        names_of(eval_step, state, feed, wanted)  # warns of a mask that is not read
    measured = measure(eval_step, state, feed.batches, strategy.cluster, wanted)
    assert measured is not None, "nothing stops it"
    for name in metrics if isinstance(metrics, Mapping) else ():
        if not any(result == name or result.startswith(f"{name}/") for result in measured):
            raise StepError(
                f"`metrics` has {name!r}, but the step returned {', '.join(map(repr, measured))}."
                f"{did_you_mean(name, measured)} Let it return `{{{name!r}: metric.update(...)}}`."
            )
    return measured


@with_hints
def predict(
    step: Any,
    state: PyTree,
    data: Any,
    *,
    strategy: Strategy | None = None,
    global_batch: int | None = None,
    verify: Verify = "first",
) -> PyTree:
    """Computes a step's results for each row of a data set, in its order, without padding.

    Args:
        step: `(state, batch) -> results` of one replica's slice of the batch, a tree of arrays [rows, ...]; distributed
            already, with `returns=("examples",)`, or not.
        state: laid out by the strategy, or on the host.
        data: arrays, a source of batches, or a distributed dataset, as for `jdist.fit`; gone through once.
        strategy: where it runs; None: the step's own, else the current one.
        global_batch: rows of a step, if `data` is arrays.
        verify: compares the first batch's results with those of one replica, once for each step, as for `jdist.fit`.

    Returns:
        The tree, of numpy arrays [rows of the data set, ...]; whole on every process.

    Raises:
        StepError: `step` is not a step, or a result has no row for each row of the batch.
        DatasetError: `data` has no rows, or is not data.
        VerificationError: the results are others than on one replica, and `verify` is "strict".

    Warns:
        VerificationWarning: the results are others than on one replica, and `verify` is "first".

    Example:
        >>> import jdist, numpy as np
        >>> jdist.predict(lambda w, batch: w * batch["x"], 2.0, {"x": np.arange(5)}, global_batch=2)
        array([0., 2., 4., 6., 8.], dtype=float32)
    """
    strategy = strategy_of(step, strategy, state)
    predict_step = eval_step_of(step, strategy, call="jdist.predict", returns="examples")
    feed = open_feed(data, strategy, global_batch=global_batch, batch_axis=predict_step.options.batch_axis)
    if not isinstance(feed.batches, DistributedDataset):
        raise DatasetError(
            "jdist.predict: batches that the workers of a parameter server read have no order. Give arrays, or a "
            "source of batches."
        )
    check_verify(verify)
    predict_step.verify_next(verify, pads=feed.pads)
    feed.batches.rewind()
    results: list[PyTree] = []
    for batch in feed.batches:
        results.append(predict_step(state, batch))
        if len(results) > _AHEAD:
            results[-1 - _AHEAD] = jax.tree.map(_on_host, results[-1 - _AHEAD])
    if not results:
        raise DatasetError("there is nothing to predict for: the data has no rows")
    results = [jax.tree.map(_on_host, result) for result in results]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *results)


def _on_host(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else np.asarray(to_host(x))


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The evaluation of a run, a function of its state: where it is evaluated, and by which strategy it is trained."""

    step: Distributed
    feed: Feed
    strategy: Strategy
    trained_by: Strategy
    metrics: Metrics

    def __call__(self, state: PyTree, stops_at: Callable[[int], bool]) -> Measured | None:
        """Measures a state, by name; None if it is to stop at a batch, of a number from 1."""
        state_here = state if self.strategy is self.trained_by else self.trained_by.fetch(state)
        return measure(self.step, state_here, self.feed.batches, self.strategy.cluster, self.metrics, stops_at)

    def names(self, state: PyTree, *, depth: int) -> frozenset[str] | None:
        """Lists the names of what it will measure, of a training state or its shapes; see `names_of`."""
        if self.strategy is not self.trained_by:  # as `fetch` would return it
            state = map_leaves(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), user_state(shapes_of(state)))
        return names_of(self.step, state, self.feed, self.metrics, depth=depth + 1)


def measure(
    eval_step: Callable[[PyTree, PyTree], Mapping[str, Any]],
    state: PyTree,
    batches: Iterable[PyTree],
    cluster: Runtime | None = None,
    metrics: Metrics = None,
    stops_at: Callable[[int], bool] = lambda part: False,
) -> Measured | None:
    """Computes means and metrics of a state over all rows, padding left out, the same everywhere; None if it is stopped."""
    cluster = cluster or alone()
    totals = MetricTotals(metrics)
    with cluster.blocked():
        if isinstance(batches, DistributedDataset):
            batches.rewind()
        for part, batch in enumerate(batches, 1):
            if stops_at(part):
                return None
            totals.add(eval_step(state, batch), batch)
        measured, weight = totals.take(cluster=cluster)
    if math.isnan(weight) and not measured:
        raise DatasetError(
            "the rows of batches that the workers of a parameter server read are not known here, so scalars cannot be averaged "
            "over them. Return contributions of `jdist.metrics`, or give arrays or a source of batches."
        )
    if not weight:
        raise DatasetError("the evaluation data has no rows; check where it comes from, and its mask")
    return measured
