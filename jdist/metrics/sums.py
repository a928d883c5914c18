"""Metrics whose accumulator is a tree of sums."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jdist.core.per_replica import named
from jdist.errors import StepError
from jdist.metrics.metric import Metric
from jdist.replica import collectives
from jdist.support.arrays import to_host

PyTree = Any


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
    """Widens a sum to 64 bits, and adds up those of several steps, whose axis leads."""
    array = _wide(to_host(x))
    if array.shape[max(array.ndim - like.ndim, 0) :] != like.shape:
        raise StepError(
            f"jdist.metrics.{name}: {named(path)} of a contribution has shape {array.shape}, that of `update` ends in "
            f"{like.shape}. Add what `update` returned, as it came out of the step."
        )
    return array.reshape(-1, *like.shape).sum(0)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64 if np.issubdtype(array.dtype, np.floating) else np.int64)
