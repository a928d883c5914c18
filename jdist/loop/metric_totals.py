"""Totals of what steps measure, exact over batches of any size, replicas and processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdist.cluster.runtime import Runtime
from jdist.core.per_replica import PerReplica
from jdist.data.batching import mask_of
from jdist.data.sources import sequential as trees
from jdist.errors import StepError
from jdist.loop.report.metrics_file import COSTS, OF_ROWS, PREFIXES, from_plain, to_plain
from jdist.metrics import Metric
from jdist.step.tree_checks import kind_of
from jdist.support.arrays import local_rows
from jdist.typing import PyTree

Measured = dict[str, Any]
Metrics = Mapping[str, Metric] | Metric | None
_WHOLE = "metrics"  # the name of a metric that stands for all that a step returns
_READ_AHEAD = 64  # calls with results that may wait to be read, so that no step waits for the host
_EXCHANGE_S = 600.0

_LEAF = jax.tree.structure(0)


class MetricTotals:
    """The results of a step's calls for metrics, added up by epoch."""

    # A scalar is averaged, each step weighted by its batch: the sum of its mask, else its rows. It
    # is left out where a parameter server's workers read the batches, as their rows are not known
    # here. A `jdist.metrics.Metric` adds up its own contributions.

    def __init__(self, metrics: Metrics = None, *, steps_per_call: int = 1, skips: bool = False):
        # One metric, such as a `jdist.metrics.collect`, takes all results of a step, unless they
        # are scalars by name. Metrics by name may be missing from the results.
        self._whole = metrics if isinstance(metrics, Metric) else None
        self._metrics = _check_metrics(metrics)
        # `skips`: means leave out steps that are not finite, as the training does.
        self._steps_per_call, self._skips = steps_per_call, skips
        self._waiting: list[tuple[Any, Any, Sequence[int], Any]] = []
        self._left_out = 0  # steps, as counted after the newest call that was read
        self._newest: Any = None
        self._epochs: dict[int, _Totals] = {}
        self._checked = False

    def begin(self, left_out: Any) -> None:
        """Counts the steps that are left out from here on; `left_out` is as for `add`, before the first call."""
        self._left_out = _read_flags(left_out)[0] if isinstance(left_out, jax.Array) else 0

    def add(self, measured: Any, batch: PyTree, epochs: Sequence[int] = (0,), left_out: Any = None) -> None:
        """Adds the results of a call, which are read later."""
        # Scalars, and contributions of metrics, by name; [steps, ...] with `steps_per_call` above
        # 1. `left_out` is `Distributed.count_left_out` after this call; None: no step was left out.
        self._waiting.append((self.note(measured), _weights(batch, self._steps_per_call), epochs, left_out))
        if len(self._waiting) > 2 * _READ_AHEAD:
            self._read(_READ_AHEAD)

    def note(self, measured: Any) -> Mapping[str, Any]:
        """Notes the results of a call for `newest` without adding them up, and returns them by name; see `add`."""
        if self._whole is not None and self._is_of(self._whole, measured):
            measured = {_WHOLE: measured}
        if not self._checked:
            self._check(measured, "the step")
        self._newest = measured
        return measured

    def names(self, measured: Any, *, by: str) -> frozenset[str] | None:
        """Lists the names of a step's results or shapes; None: one metric stands for all."""
        if self._whole is not None and self._is_of(self._whole, measured):
            return None
        self._check(measured, by)
        return frozenset(measured)

    def newest(self) -> Measured:
        """Waits for the metrics of the last step: plain numbers by name, the loss first."""
        if self._newest is None:
            return {}
        values = jax.device_get(dict(self._newest))
        if self._steps_per_call > 1:
            values = jax.tree.map(lambda x: x[-1], values)
        return _flatten_results({name: self._result(name, value) for name, value in values.items()})

    def take(self, epoch: int = 0, cluster: Runtime | None = None) -> tuple[Measured, float]:
        """Takes an epoch out: its results by name, the loss first, and its total weight."""
        # `cluster` has the processes that share the rows of each batch; all of them must ask.
        self._read(0)
        totals = self._epochs.pop(epoch, None) or _Totals()
        weight, sums = totals.together(cluster)
        results: Measured = {name: total / weight if weight else math.nan for name, total in sums.items()}
        results |= {name: self._metrics[name].compute(total) for name, total in totals.contributed.items()}
        return _flatten_results(results), weight

    def notes(self, cluster: Runtime | None = None) -> dict[str, Any]:
        """Saves the totals of epochs that have not ended as plain JSON values; all processes have to ask."""
        self._read(0)
        notes = {}
        for epoch, totals in sorted(self._epochs.items()):
            weight, sums = totals.together(cluster)
            contributed = {
                name: _pack_total(self._metrics[name].zero, total) for name, total in totals.contributed.items()
            }
            notes[str(epoch)] = {"weight": to_plain(weight), "sums": to_plain(sums), "contributed": contributed}
        return notes

    def restore(self, notes: Mapping[str, Any], cluster: Runtime | None = None) -> None:
        """Restores what `notes` saved."""
        self._waiting.clear()
        self._epochs.clear()
        is_one = cluster is None or cluster.is_chief  # the processes add up their sums
        for epoch, note in notes.items():
            totals = self._epochs[int(epoch)] = _Totals()
            totals.weight = from_plain(note["weight"]) if is_one else 0.0
            totals.sums = {name: total if is_one else 0.0 for name, total in from_plain(note["sums"]).items()}
            totals.contributed = {
                name: _unpack_total(self._metrics[name].zero, kept)
                for name, kept in note["contributed"].items()
                if name in self._metrics
            }

    def _is_of(self, metric: Metric, measured: Any) -> bool:
        """Returns whether a step's whole result is a metric's contribution, which need not have its zero's form."""
        alike = jax.tree.structure(measured) == jax.tree.structure(metric.zero)
        return alike or not (isinstance(measured, Mapping) and all(map(self._is_scalar, measured.values())))

    def _is_scalar(self, value: Any) -> bool:
        return not isinstance(value, Mapping | list | tuple) and np.ndim(value) == (self._steps_per_call > 1)

    def _check(self, measured: Any, by: str) -> None:
        self._checked = True
        if not isinstance(measured, Mapping):
            example = 'return a dict of scalars by name, such as `{"loss": loss}`.'
            raise StepError(f"{by} returned {kind_of(measured)} for metrics; {example}")
        for name, value in measured.items():
            if not isinstance(name, str):
                raise StepError(
                    f"{by} returned a metric of the name {name!r:.80}, of type {type(name).__name__}; names are text."
                )
            if name in OF_ROWS + COSTS or name.startswith(PREFIXES):
                own = ", ".join(map(repr, OF_ROWS + COSTS))
                raise StepError(
                    f"{by} returned a metric of the name {name!r}, which the rows of a run have themselves. Choose another, "
                    f"which is not {own} and does not begin with {' or '.join(map(repr, PREFIXES))}."
                )
            if isinstance(value, PerReplica):
                raise StepError(
                    f"{by} returned metric {name!r} as a PerReplica, which is not one number. Return the value "
                    "itself, which is averaged, or `jdist.all_reduce(value, ...)`."
                )
            metric = self._metrics.get(name)
            if metric is not None and self._is_scalar(value) and jax.tree.structure(metric.zero) != _LEAF:
                raise StepError(
                    f"{by} returned a number as metric {name!r}, which `metrics` has as jdist.metrics.{metric.name}. Return "
                    "what its `update(...)` returns, or give the number another name."
                )
            if metric is None and not self._is_scalar(value):
                shape = (
                    type(value).__name__ if isinstance(value, Mapping | list | tuple) else f"shape {np.shape(value)}"
                )
                raise StepError(
                    f"{by} returned metric {name!r} of {shape}, not a scalar. If it holds a value for each row, return "
                    'their mean, `jdist.mean(rows, batch["mask"])`; if it is what a `jdist.metrics` metric contributes, say '
                    f"which: `metrics={{{name!r}: metric}}`."
                    + (f" It has {', '.join(map(repr, self._metrics))}." if self._metrics else "")
                )

    def _read(self, keep: int) -> None:
        """Adds up the calls that wait, but for the last `keep`."""
        end = len(self._waiting) - keep
        read, self._waiting = self._waiting[:end], self._waiting[end:]
        for measured, weights, epochs, left_out in read:
            values = jax.device_get(dict(measured))
            if weights is None:
                values = {name: value for name, value in values.items() if name in self._metrics}
                each = [math.nan]
            else:
                each = weights() if self._steps_per_call > 1 else [weights().sum()]
            steps = [
                values if self._steps_per_call == 1 else jax.tree.map(lambda x, i=i: x[i], values)
                for i in range(len(epochs))
            ]
            skipped = self._which_left_out(len(steps), left_out)
            for i, (epoch, values_of_step) in enumerate(zip(epochs, steps, strict=True)):
                weight = 0.0 if i in skipped else float(np.sum(each[i]))
                self._epochs.setdefault(epoch, _Totals()).add(weight, values_of_step, self._metrics)

    def _which_left_out(self, num_steps: int, left_out: Any) -> set[int]:
        """Finds the steps of a call that were left out."""
        if not self._skips or left_out is None:
            return set()
        count, _, *each = _read_flags(left_out)
        if each:
            return {i for i, was in enumerate(each[:num_steps]) if was}
        before, self._left_out = self._left_out, count
        return {0} if count > before else set()

    def _result(self, name: str, value: Any) -> Any:
        metric = self._metrics.get(name)
        return float(value) if metric is None else metric.compute(metric.add(metric.zero, value))


def _read_flags(left_out: Any) -> list[int]:
    """Reads the count, a number of no use here, and a flag for each step of the call if there are any."""
    host = left_out.addressable_data(0) if isinstance(left_out, jax.Array) else left_out
    return [*np.ravel(host).tolist(), 0][: max(2, np.size(host))]


def _check_metrics(metrics: Any) -> dict[str, Metric]:
    if isinstance(metrics, Metric):
        return {_WHOLE: metrics}
    if metrics is not None and not (
        isinstance(metrics, Mapping) and all(isinstance(metric, Metric) for metric in metrics.values())
    ):
        raise StepError(
            f'`metrics` is {metrics!r:.80}; give metrics by name, such as `{{"auc": jdist.metrics.auc()}}`, or one '
            "metric, if its contribution is all that a step returns."
        )
    return dict(metrics or {})


class _Totals:
    """The totals of one epoch."""

    def __init__(self) -> None:
        self.weight = 0.0
        self.sums: dict[str, float] = {}
        self.contributed: dict[str, Any] = {}

    def together(self, cluster: Runtime | None) -> tuple[float, dict[str, float]]:
        """Adds up weight and sums over the processes: each knows the weights of its own rows; measured values are the same."""
        if cluster is None or cluster.num_processes == 1:
            return self.weight, self.sums
        totals = cluster.exchange("a mean over all rows", [self.weight, self.sums], _EXCHANGE_S)
        return sum(weight for weight, _ in totals), {name: sum(sums[name] for _, sums in totals) for name in self.sums}

    def add(self, weight: float, values: Mapping[str, Any], metrics: Mapping[str, Metric]) -> None:
        self.weight += weight
        for name, value in values.items():
            if name in metrics:
                metric = metrics[name]
                self.contributed[name] = metric.add(self.contributed.get(name, metric.zero), value)
            elif weight:  # of no rows a mean is NaN, and says nothing
                self.sums[name] = self.sums.get(name, 0.0) + weight * float(value)
            else:
                self.sums.setdefault(name, 0.0)


def _tree_to_plain(tree: PyTree) -> Any:
    return trees.to_plain(jax.tree.map(np.asarray, tree), "metrics")


def _pack_total(zero: PyTree, total: PyTree) -> dict[str, Any]:
    """Turns a total into plain JSON values: its leaves alone where it is of its zero's form, which may hold any types."""
    leaves, structure = jax.tree.flatten(total)
    if structure == jax.tree.structure(zero):
        return _tree_to_plain(leaves)
    if isinstance(zero, Mapping):
        return {"dict": {name: _pack_total(zero[name], each) for name, each in total.items()}}
    return _tree_to_plain(total)


def _unpack_total(zero: PyTree, kept: dict[str, Any]) -> PyTree:
    """Inverts `_pack_total`."""
    total, structure = trees.from_plain(kept), jax.tree.structure(zero)
    leaves = jax.tree.leaves(total)
    if len(leaves) == structure.num_leaves:
        return jax.tree.unflatten(structure, leaves)
    return {name: _unpack_total(zero[name], each) for name, each in kept["dict"].items()} if "dict" in kept else total


def _weights(batch: PyTree, steps_per_call: int) -> Any:
    """Makes a function that reads the weights of a batch's rows, or of each step's; it holds no other array of the batch."""
    mask = mask_of(batch)
    if mask is not None:
        return lambda: np.asarray(local_rows(mask, axis=int(steps_per_call > 1)), np.float64)
    leaf = jax.tree.leaves(batch)[0]
    if not isinstance(leaf, np.ndarray | jax.Array):
        return None  # a parameter server's worker reads it, and nobody here knows its rows
    return lambda: np.ones(leaf.shape[:1])


def _flatten_results(results: Measured) -> Measured:
    """Names the results of a collection of metrics by their own names, and puts the loss first."""
    flat: Measured = {}
    for name, value in results.items():
        if isinstance(value, Mapping):
            flat |= {inner if name == _WHOLE else f"{name}/{inner}": each for inner, each in value.items()}
        else:
            flat[name] = value
    # JAX returns dicts sorted by name.
    return dict(sorted(flat.items(), key=lambda item: item[0] != "loss"))
