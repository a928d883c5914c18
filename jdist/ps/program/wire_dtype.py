"""Chooses what travels as bfloat16 instead of float32: half the bytes, the same range, eight bits of precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from jdist.ps.program.split_step import SplitStep
from jdist.ps.protocol.wire import ROUNDED

Wire = Literal["float32", "bf16"]


@dataclass(frozen=True)
class Rounding:
    """The arrays that travel rounded."""

    leaves: frozenset[int]  # leaves of the state that workers pull rounded
    pushed: tuple[frozenset[int], ...]  # for each step, its pushed arrays that are rounded

    def of_leaf(self, i: int, shape: Any) -> Any:
        """Returns shape and dtype of a leaf as workers pull it."""
        return _rounded(shape) if i in self.leaves else shape

    def of_pushed(self, step: int, j: int, shape: Any) -> Any:
        """Returns shape and dtype of an array as it is pushed."""
        return _rounded(shape) if j in self.pushed[step] else shape


def make_rounding(steps: Sequence[SplitStep], wire: Wire) -> Rounding:
    """Chooses the arrays to round: float32, but no single numbers and no carried leaves."""
    if wire == "float32":
        return Rounding(frozenset(), tuple(frozenset() for _ in steps))
    carried = {i for step in steps for i in _carried(step)}

    def pushed(step: SplitStep) -> frozenset[int]:
        exact = {j for unit in step.update.units if carried.intersection(unit.leaves) for j in unit.pushed}
        return frozenset(j for j in step.pushed if j not in exact and _may_be_rounded(step.update.pushed_shapes[j]))

    shapes = steps[0].update.shapes
    leaves = frozenset(i for i, shape in enumerate(shapes) if i not in carried and _may_be_rounded(shape))
    return Rounding(leaves, tuple(map(pushed, steps)))


def _carried(step: SplitStep) -> set[int]:
    """Finds the leaves that a worker reads and recomputes, such as a layer's running statistics."""
    # Rounded both ways, they would lose each small change.
    reads, carried = step.update.reads, step.carried.leaves
    return {i for i in step.read if i in reads and (i in carried or i not in reads[i])}


def _may_be_rounded(shape: Any) -> bool:
    return shape.dtype == np.float32 and len(shape.shape) > 0


def _rounded(shape: Any) -> Any:
    return jax.ShapeDtypeStruct(shape.shape, ROUNDED)
