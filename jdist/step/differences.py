"""The comparison behind `jdist.verify`: differences between two results of a step, and how much of each is rounding.

How much rounding may change a leaf depends on the step: AdamW turns a gradient that is zero but for rounding into a whole
step. So the step runs again with small random errors in its sums, as large as each dtype's rounding; what they change in
a leaf is the leaf's measure. Arguments stay unchanged: the errors must not change the decisions that a program makes on them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.support.arrays import is_key

IN_JIT = (
    'If the step means the whole batch throughout, `transform="jit"` of the strategy computes that from the same text.'
)

# A leaf before and after a step, on the host; of a metric zeros, and what the step returned.
Leaf = tuple[Any, Any]

_OF_CHANGE = 1e-5  # sums in another order, in float32, relative to how much a step changes a leaf
# Times the measured noise. That of few elements is less certain: four of a bias before batch normalisation, with a
# gradient of zero but for rounding in bfloat16, came to 4.5 times (tests/step/test_mutated_steps.py).
_OF_NOISE, _OF_NOISE_FEW, _FEW = 2.0, 8.0, 16
NUM_TRIALS = 8
_COARSE = 0.01  # of a leaf's change: leaves that are compared less closely are listed


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


@dataclass(frozen=True, eq=False)
class Pair:
    """A leaf as one replica makes it and as another way does, with its value before the step."""

    name: str
    place: int
    before: Any
    alone: Any
    together: Any

    @property
    def one(self) -> Leaf:
        return self.before, self.alone

    @property
    def other(self) -> Leaf:
        return self.before, self.together


@dataclass(frozen=True)
class Found:
    """Pairs of leaves, and how far apart rounding may leave each."""

    pairs: list[Pair]
    within: dict[str, float]

    @functools.cached_property
    def differing(self) -> list[Pair]:
        return [pair for pair in self.pairs if apart(pair.one, pair.other) > self.within[pair.name]]

    def coarse(self) -> Iterator[str]:
        """Ends a sentence "Not compared ..." with leaves that are the same, but could differ by much for all one knows."""
        differing = {pair.name for pair in self.differing}
        same = [pair for pair in self.pairs if pair.name not in differing and change(pair.one).any()]
        tolerances = {pair.name: of_change(self.within[pair.name], pair.one) for pair in same}
        coarse = sorted(((x, name) for name, x in tolerances.items() if x > _COARSE), reverse=True)
        if coarse:
            named = ", ".join(
                f"{name} (within {x:.0%} of its change)"
                if x <= 1
                else f"{name} (it changes by rounding alone, as with a zero gradient)"
                for x, name in coarse[:3]
            )
            more = f" and {len(coarse) - 3} more" if len(coarse) > 3 else ""
            yield f"closely, as rounding is most of how they change: {named}{more}"


def as_averages(pairs: list[Pair], parts: int) -> list[Pair]:
    """Divides out of nnx metrics the values that every part has added: `nnx.metrics.Average` divides sum by count."""
    by_metric: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_metric.setdefault(pair.name.rpartition("[")[0], []).append(pair)
    divided: dict[str, Pair] = {}
    for name, group in by_metric.items():
        changes = [[change(leaf) for leaf in (pair.one, pair.other)] for pair in group]
        counted = [one.any() and np.array_equal(parts * one, other) for one, other in changes]
        if name.startswith("state.metrics") and len(group) > 1 and any(counted):
            for pair, (_, together_change) in zip(group, changes, strict=True):
                together = (as_numbers(pair.before) + together_change / parts).astype(pair.alone.dtype)
                divided[pair.name] = dataclasses.replace(pair, together=together)
    return [divided.get(pair.name, pair) for pair in pairs]


@dataclass(frozen=True)
class Difference:
    """A leaf that differs by more than rounding.

    Attributes:
        leaf: its path, `state['w']` or `metrics['loss']`.
        one: its value as one replica; of an array the Euclidean norm.
        distributed: the same, distributed.
        relative: how far apart both are, relative to how much the step changes the leaf.
        cause: the likely cause, as a clause.
        remedy: what to write instead, as a sentence.
    """

    leaf: str
    one: float
    distributed: float
    relative: float
    cause: str
    remedy: str

    def __str__(self) -> str:
        return (
            f"{self.leaf}: {self.one:.6g} as one replica, {self.distributed:.6g} distributed "
            f"({self.relative:.2g} of its change apart)"
        )


@dataclass(frozen=True)
class Verification:
    """The result of `jdist.verify`; true if nothing differs.

    Attributes:
        differences: the leaves of state and metrics that differ by more than rounding.
        remedy: what to do, for the likeliest cause first; last, where it helps, the global view. Empty if nothing differs.
        not_compared: what was left out, and why; and the leaves that rounding lets be compared only coarsely, and how coarsely.
        num_compared: how many leaves were compared.
        parts: into how many parts the batch was cut: replicas times microbatches.
    """

    differences: tuple[Difference, ...]
    remedy: str
    not_compared: tuple[str, ...]
    num_compared: int
    parts: int

    @property
    def ok(self) -> bool:
        """Returns whether nothing differs, of what was compared."""
        return not self.differences

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        left_out = [f"Not compared: {each}." for each in self.not_compared]
        if self.ok:
            same = f"{self.num_compared} leaves are the same in {self.parts} parts as in one, but for rounding."
            return "\n".join([*([same] if self.num_compared else []), *left_out])
        lines = [
            f"{len(self.differences)} of {self.num_compared} leaves differ, beyond rounding, between one replica with the "
            f"whole batch and the {self.parts} parts that it is cut into."
        ]
        for cause, remedy in dict.fromkeys((each.cause, each.remedy) for each in self.differences):
            leaves = [each for each in self.differences if each.cause == cause]
            lines.append(f"Likely cause: {cause}. {remedy} It shows in")
            lines += [f"  {each}" for each in leaves[:3]]
            if len(leaves) > 3:
                lines.append(f"  and {len(leaves) - 3} more")
        if self.remedy.endswith(IN_JIT):
            lines.append(IN_JIT)
        return "\n".join([*lines, *left_out])

    __repr__ = __str__
