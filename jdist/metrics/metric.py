"""Metrics: each batch contributes to a total, from which the result is computed; the mean, sums, and several as one."""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.core.per_replica import named
from jdist.errors import StepError
from jdist.metrics.in_step import real_numbers, weights
from jdist.replica import collectives
from jdist.support.arrays import promote_types, to_host
from jdist.support.words import did_you_mean
from jdist.typing import PyTree

# How many contributions may wait to be read: steps run ahead, and a parameter server's workers all
# have work, while the memory that contributions take stays bounded.
_AHEAD = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class Metric:
    """A metric, as a value: four pure functions and nothing that changes.

    A *contribution* is what one global batch adds, a tree of arrays that `update` makes on the replicas; a *total* is a tree of
    the same form, of numpy arrays on the host, in 64 bits. `add` is associative and `zero` is its neutral element, so any way
    to cut a data set into batches, replicas and processes gives the same total.

    Attributes:
        name: for errors.
        update: `(*inputs, mask=None) -> contribution`; called in a step, on every replica, with its slice of the batch. The
            contribution is that of the global batch, the same on every replica, and is returned among the step's metrics.
        zero: the total of nothing.
        add: `(total, contribution) -> total`. A leading axis of several steps (`steps_per_call`) is added up, too.
        compute: `(total) -> result`; of a single contribution as well.

    Example:
        >>> import jdist, jax.numpy as jnp
        >>> accuracy = jdist.metrics.accuracy()
        >>> total = accuracy.zero
        >>> for ids, labels in [([0, 1, 2], [0, 1, 1]), ([2], [2])]:
        ...     total = accuracy.add(total, accuracy.update(jnp.array(ids), jnp.array(labels)))
        >>> accuracy.compute(total)
        0.75
    """

    name: str
    update: Callable[..., PyTree]
    zero: PyTree
    add: Callable[[PyTree, PyTree], PyTree]
    compute: Callable[[PyTree], Any]

    def total(self, contributions: Iterable[PyTree]) -> PyTree:
        """Adds up contributions, and reads each only after some more were asked for, so that steps run ahead.

        Args:
            contributions: for example `eval_step(state, batch) for batch in batches`.

        Returns:
            The total, for `compute`, or to `add` more to.
        """
        total, waiting = self.zero, deque[PyTree]()
        for contribution in contributions:
            waiting.append(contribution)
            if len(waiting) > _AHEAD:
                total = self.add(total, waiting.popleft())
        for contribution in waiting:
            total = self.add(total, contribution)
        return total

    def __repr__(self) -> str:
        return f"<metric {self.name}>"


def of_sums(name: str, sums: Callable[..., PyTree], compute: Callable[[PyTree], Any], *, zero: PyTree) -> Metric:
    """Makes a metric of sums over rows, as most are.

    Args:
        name: for errors.
        sums: `(*inputs, mask=None) -> tree of sums`, over the rows of one replica; leaves out where `mask` is zero, and
            calls no collective. Count in integers: they are added up in 32 bits in a step, in 64 bits over the steps.
        compute: `(tree of numpy arrays, int64 and float64) -> result`.
        zero: the tree of sums of no rows, which says their shapes.

    Returns:
        The metric; its `update` has the arguments of `sums`.

    Example:
        >>> import jdist, jax.numpy as jnp
        >>> def sums(predictions, targets, mask=None):
        ...     mask = jnp.ones(targets.shape, bool) if mask is None else mask
        ...     return {"squares": jnp.where(mask, (predictions - targets) ** 2, 0).sum(), "count": mask.sum()}
        >>> zero = {"squares": 0, "count": 0}
        >>> rmse = jdist.metrics.of_sums("rmse", sums, lambda t: float((t["squares"] / t["count"]) ** 0.5), zero=zero)
        >>> rmse.compute(rmse.update(jnp.array([1.0, 5.0]), jnp.array([1.0, 3.0]), jnp.array([True, True])))
        1.4142135623730951
    """
    zero = jax.tree.map(lambda x: _wide(np.asarray(x)), zero)

    @functools.wraps(sums)
    def update(*inputs: Any, **named_inputs: Any) -> PyTree:
        return collectives.all_reduce(sums(*inputs, **named_inputs), "sum")

    def as_total(contribution: PyTree) -> PyTree:
        structure, wanted = jax.tree.structure(contribution), jax.tree.structure(zero)
        if structure != wanted:
            raise StepError(
                f"jdist.metrics.{name}: a contribution has the tree {structure!s:.200}; that of `update` is {wanted!s:.200}. "
                "Add what `update` returned, out of a step's metrics; of what `strategy.run` returned, one version: "
                "`result.local_results()[0]`."
            )
        return jax.tree_util.tree_map_with_path(lambda path, like, x: _summed(name, path, like, x), zero, contribution)

    def add(total: PyTree, contribution: PyTree) -> PyTree:
        return jax.tree.map(np.add, as_total(total), as_total(contribution))

    return Metric(name=name, update=update, zero=zero, add=add, compute=lambda total: compute(as_total(total)))


def _summed(name: str, path: Any, like: np.ndarray, x: Any) -> np.ndarray:
    """Widens a sum to 64 bits, and adds up those of several steps (the leading axis)."""
    array = _wide(to_host(x))
    if array.shape[max(array.ndim - like.ndim, 0) :] != like.shape:
        raise StepError(
            f"jdist.metrics.{name}: {named(path)} of a contribution has shape {array.shape}, that of `update` ends in "
            f"{like.shape}. Add what `update` returned, as it came out of the step."
        )
    return array.reshape(-1, *like.shape).sum(0)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64 if np.issubdtype(array.dtype, np.floating) else np.int64)


def mean() -> Metric:
    """Averages values, weighted by a mask: `sum(mask * values) / sum(mask)`.

    `update(values, mask=None)`, with values of shape [rows, ...] and a mask of bools or weights with a prefix of that
    shape. Bools are counted exactly; other values are added up in float32 (or wider, if they are) within a batch and in float64
    over the batches. What is NaN or infinite on padding stays out.

    Returns:
        The metric; its result is a float, of no rows NaN with a warning.

    Example:
        >>> import jdist, jax.numpy as jnp
        >>> loss = jdist.metrics.mean()
        >>> loss.compute(loss.update(jnp.array([1.0, 3.0, 100.0]), jnp.array([True, True, False])))
        2.0

    Source: `numpy.average`.
    """

    def sums(values: Any, mask: Any = None) -> PyTree:
        return mean_sums("jdist.metrics.mean", values, mask)

    return of_mean("mean", sums)


def mean_sums(call: str, values: Any, mask: Any) -> PyTree:
    """Sums the weighted values and the weights."""
    values = real_numbers(call, "`values`", values)
    weight = weights(call, mask, values.shape)
    values = values.astype(jnp.int32 if values.dtype == jnp.bool_ else promote_types(values.dtype, jnp.float32))
    return {"total": jnp.where(weight != 0, weight * values, 0).sum(), "weight": weight.sum()}


def of_mean(name: str, sums: Callable[..., PyTree]) -> Metric:
    """Makes a metric that divides what `sums` returns, as `mean_sums` does: weighted values by weights."""

    def compute(total: dict[str, np.ndarray]) -> float:
        if total["weight"] == 0:
            undefined(name, "no row counts")
            return float("nan")
        return float(total["total"] / total["weight"])

    return of_sums(name, sums, compute, zero={"total": 0, "weight": 0})


def undefined(name: str, why: str) -> None:
    """Warns that a metric has no value."""
    warnings.warn(f"jdist.metrics.{name} is undefined, and NaN: {why}.", stacklevel=2)


def collect(metrics: Mapping[str, Metric]) -> Metric:
    """Combines metrics by name into one, with dicts as contributions, totals and results.

    `update(inputs, mask=None)`, with a dict that gives each metric its inputs: a tuple, or the input itself where it is
    one; the mask is for all of them.

    Args:
        metrics: metrics by name; a collection is one as well.

    Returns:
        The metric; its result has the results by name, in the order of `metrics`.

    Raises:
        StepError: `metrics` is not such a dict; when traced, `inputs` has other names.

    Example:
        >>> import jdist, jax.numpy as jnp
        >>> metrics = jdist.metrics.collect({"loss": jdist.metrics.mean(), "accuracy": jdist.metrics.accuracy()})
        >>> logits, labels = jnp.array([[2.0, 1.0], [3.0, 1.0]]), jnp.array([0, 1])
        >>> inputs = {"loss": jnp.array([0.5, 1.5]), "accuracy": (logits, labels)}
        >>> metrics.compute(metrics.update(inputs, mask=jnp.array([True, True])))
        {'loss': 1.0, 'accuracy': 0.5}
    """
    if not isinstance(metrics, Mapping) or not metrics:
        raise StepError(
            f"jdist.metrics.collect: `metrics` is {metrics!r:.80}; it must be a dict of metrics by name, such as "
            '{"loss": jdist.metrics.mean()}.'
        )
    for name, metric in metrics.items():
        if not isinstance(name, str) or not isinstance(metric, Metric):
            raise StepError(
                f"jdist.metrics.collect: {name!r} is {metric!r:.80}; each name is text and each value a metric, made by a call "
                "such as `jdist.metrics.mean()`."
            )
    metrics = dict(metrics)

    def update(inputs: Mapping[str, Any], mask: Any = None) -> PyTree:
        _check_names("`inputs`", inputs, metrics)
        arguments = {name: x if isinstance(x, tuple) else (x,) for name, x in inputs.items()}
        return {name: metric.update(*arguments[name], mask=mask) for name, metric in metrics.items()}

    def add(total: PyTree, contribution: PyTree) -> PyTree:
        _check_names("a contribution", contribution, metrics)
        return {name: metric.add(total[name], contribution[name]) for name, metric in metrics.items()}

    def compute(total: PyTree) -> dict[str, Any]:
        _check_names("a total", total, metrics)
        return {name: metric.compute(total[name]) for name, metric in metrics.items()}

    zero = {name: metric.zero for name, metric in metrics.items()}
    return Metric(name=f"collect({', '.join(metrics)})", update=update, zero=zero, add=add, compute=compute)


def _check_names(what: str, tree: Any, metrics: Mapping[str, Metric]) -> None:
    wrong, names = None, ", ".join(map(repr, metrics))
    if not isinstance(tree, Mapping):
        wrong = f"is a {type(tree).__name__}; it must be a dict with the names {names}."
    elif (other := next((name for name in tree if name not in metrics), None)) is not None:
        wrong = f"has {other!r}, which is not a metric; the metrics are {names}.{did_you_mean(other, metrics)}"
    elif missing := [name for name in metrics if name not in tree]:
        wrong = f"lacks {', '.join(map(repr, missing))}; every metric needs its own in every step."
    if wrong is not None:
        raise StepError(f"jdist.metrics.collect: {what} {wrong}")
