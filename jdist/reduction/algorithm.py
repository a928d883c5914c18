"""What an all-reduce algorithm is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

PyTree = Any


class Reduction(NamedTuple):
    """An all-reduce algorithm.

    Attributes:
        name: how reprs call it.
        init: `(tree) -> carry`, what each replica keeps from call to call, before the first (`()` for nothing).
        apply: `(tree, carry, axes) -> (tree summed over the mesh axes, carry)`; called where `axes` are bound.
        exact: whether `apply` gives the sum itself and keeps nothing. One that does not serves gradients alone; metrics
            and `jdist.all_reduce` then use `psum`, and the carry becomes part of the state.
        num_replicas: for how many replicas it is; None: for any number.
    """

    name: str
    init: Callable[[PyTree], PyTree]
    apply: Callable[[PyTree, PyTree, tuple[str, ...]], tuple[PyTree, PyTree]]
    exact: bool = True
    num_replicas: int | None = None


def axes_size(axes: tuple[str, ...]) -> int:
    """How many replicas are spread over mesh axes that are bound."""
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def keeping_nothing(
    name: str, total: Callable[[PyTree, tuple[str, ...]], PyTree], *, num_replicas: int | None = None
) -> Reduction:
    """The Reduction of a function `(tree, axes) -> sum` without a carry."""
    return Reduction(
        name, lambda tree: (), lambda tree, carry, axes: (total(tree, axes), carry), num_replicas=num_replicas
    )
