"""The mean over all rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdist.metrics.in_step import real_numbers, weights
from jdist.metrics.metric import Metric
from jdist.metrics.sums import of_sums
from jdist.support.arrays import promote_types

PyTree = Any


def mean() -> Metric:
    """Averages values, weighted by a mask: `sum(mask * values) / sum(mask)`.

    `update(values, mask=None)`, with values of shape [rows, ...] and a mask of bools or weights whose shape is the beginning of
    that. Bools are counted exactly; other values are added up in float32 (or wider, if they are) within a batch and in float64
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
