"""The measure of rounding: whether two results of a step are equal but for it.

How much rounding may change a leaf depends on the step: AdamW turns a gradient that is zero but for rounding into a whole
step. So the step is run again with other errors of rounding in its sums, each as its own dtype rounds; what they change in a
leaf is the leaf's measure. Arguments stay as they are: the errors must not change the decisions that a program makes on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.support.arrays import is_key

PyTree = Any

# A leaf before and after a step, on the host; of a metric zeros, and what the step returned.
Leaf = tuple[Any, Any]

_OF_CHANGE = 1e-5  # sums in another order, in float32, relative to how much a step changes a leaf
# Times the measured noise. That of few elements is less certain: four of a bias before batch normalisation, whose gradient
# is zero but for rounding in bfloat16, came to 4.5 times (tests/step/test_mutated_steps.py).
_OF_NOISE, _OF_NOISE_FEW, _FEW = 2.0, 8.0, 16
NUM_TRIALS = 8


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


def apart(one: Leaf, other: Leaf) -> float:
    return distance(as_numbers(one[1]), as_numbers(other[1]))


def change(leaf: Leaf) -> np.ndarray:
    """Computes the change that a step makes to a leaf."""
    with np.errstate(invalid="ignore"):
        return as_numbers(leaf[1]) - as_numbers(leaf[0])


def relative(one: Leaf, other: Leaf) -> float:
    """Computes the distance of two results, relative to the change that the first makes to the leaf."""
    return of_change(apart(one, other), one)


def of_change(length: float, leaf: Leaf) -> float:
    """Divides a distance by the change that a step makes to the leaf."""
    size = distance(change(leaf), np.zeros(1))
    return length / size if size else float("inf") if length else 0.0


def allowance(one: Leaf) -> float:
    """Computes how far apart sums in another order leave a well-conditioned leaf; 0 for a leaf of whole numbers."""
    dtype = one[1].dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    last_digit = float(jnp.finfo(dtype).eps) * float(np.linalg.norm(as_numbers(one[1]).ravel()))
    return _OF_CHANGE * distance(change(one), np.zeros(1)) + last_digit


def noise(one: Leaf, others: Sequence[Leaf]) -> float:
    """Computes how far apart errors of rounding may leave a leaf, from runs with such errors."""
    factor = _OF_NOISE_FEW if np.size(one[1]) < _FEW else _OF_NOISE
    return factor * max(apart(one, other) for other in others)
