"""The measure of rounding: whether two results of a step are equal but for it.

How much rounding may change a leaf depends on the step: AdamW turns a gradient that is zero but for rounding into a whole
step. So the step is run again on arguments that differ by rounding alone, and what that changes is the measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.support.arrays import is_key

PyTree = Any

# A leaf before and after a step, on the host; of a metric zeros, and what the step returned.
Leaf = tuple[Any, Any]

_OF_CHANGE = 1e-5  # sums in another order, in float32, relative to how much a step changes a leaf
_OF_NOISE, _OF_NOISE_FEW, _FEW = 5.0, 15.0, 16  # times the measured noise; a noise of few elements is less certain
_NUM_TRIALS = 4


def as_numbers(x: Any) -> np.ndarray:
    """Converts a leaf on the host to float64 or complex128, PRNG keys as their words."""
    array = np.asarray(jax.random.key_data(x) if is_key(x) else x)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Computes the Euclidean distance; infinite where one of two elements is finite, or both are infinities of two kinds."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    with np.errstate(invalid="ignore"):
        apart = np.abs(np.where(same, 0, a - b))
    return float(np.linalg.norm(apart.ravel())) if np.isfinite(apart).all() else float("inf")


def _apart(one: Leaf, other: Leaf) -> float:
    return distance(as_numbers(one[1]), as_numbers(other[1]))


def change(leaf: Leaf) -> np.ndarray:
    """Computes the change that a step makes to a leaf."""
    with np.errstate(invalid="ignore"):
        return as_numbers(leaf[1]) - as_numbers(leaf[0])


def relative(one: Leaf, other: Leaf) -> float:
    """Computes the distance of two results, relative to the change that the first makes to the leaf."""
    apart, size = _apart(one, other), distance(change(one), np.zeros(1))
    return apart / size if size else float("inf") if apart else 0.0


def suspects(one: Sequence[Leaf], other: Sequence[Leaf], dtypes: Sequence[Any]) -> list[int]:
    """Finds leaves that differ by more than sums in another order make of a well-conditioned step in float32."""
    return [i for i, (a, b, dtype) in enumerate(zip(one, other, dtypes, strict=True)) if not _close(a, b, dtype)]


def _close(one: Leaf, other: Leaf, dtype: Any) -> bool:
    apart = _apart(one, other)
    if not apart:
        return True
    if not jnp.issubdtype(dtype, jnp.inexact):
        return False
    last_digit = float(jnp.finfo(dtype).eps) * float(np.linalg.norm(as_numbers(one[1]).ravel()))
    return apart <= _OF_CHANGE * distance(change(one), np.zeros(1)) + last_digit


def beyond_rounding(
    one: Sequence[Leaf],
    other: Sequence[Leaf],
    among: Sequence[int],
    run: Callable[[Callable[[Any], Any]], Sequence[Leaf]],
    eps: float,
) -> list[int]:
    """Finds leaves that differ by more than the step itself makes of rounding.

    Args:
        one: the results as one replica.
        other: the results to compare.
        among: the places to look at.
        run: the step as one replica, with a function applied to each of its arguments' leaves on the host.
        eps: the relative error of a rounding, of the least precise numbers that the step computes with.
    """
    if not among:
        return []
    noise = [0.0] * len(one)
    for trial in range(_NUM_TRIALS):
        results = run(_rounded(eps, np.random.default_rng(trial)))
        for i in among:  # of the change, not of the value: errors in the arguments are no noise of the step
            noise[i] = max(noise[i], distance(change(results[i]), change(one[i])))
    factors = {i: _OF_NOISE_FEW if np.size(one[i][1]) < _FEW else _OF_NOISE for i in among}
    return [i for i in among if _apart(one[i], other[i]) > factors[i] * noise[i]]


def _rounded(eps: float, random: np.random.Generator) -> Callable[[Any], Any]:
    """Makes the function that gives a leaf errors of rounding; integers and keys none."""

    def with_errors(x: Any) -> Any:
        # A Python number stays one: as an array it would compile the step again.
        if not isinstance(x, np.ndarray | np.generic) or not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        array: Any = np.asarray(x)
        size = max(eps, float(jnp.finfo(array.dtype).eps))
        return (array * (1 + size * random.uniform(-1, 1, array.shape))).astype(array.dtype)

    return with_errors
