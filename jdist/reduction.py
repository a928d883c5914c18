"""How replicas sum their gradients: all-reduce algorithms, each an `(init, apply)` pair of pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jdist.errors import StrategyError

PyTree = Any


class Reduction(NamedTuple):
    """An all-reduce algorithm.

    Attributes:
        name: how configs and reprs call it.
        init: `(tree) -> carry`, what the algorithm keeps from call to call (`()` for one that keeps nothing).
        apply: `(tree, carry, axes) -> (tree summed over the mesh axes, carry)`; called where `axes` are bound.
    """

    name: str
    init: Callable[[PyTree], PyTree]
    apply: Callable[[PyTree, PyTree, tuple[str, ...]], tuple[PyTree, PyTree]]


def psum() -> Reduction:
    """One `lax.psum` of the whole tree; XLA picks the algorithm (NCCL, ICI) and combines the leaves.

    Example:
        >>> import jdist
        >>> jdist.reduction.psum().name
        'psum'
    """
    return Reduction("psum", lambda tree: (), lambda tree, carry, axes: (jax.lax.psum(tree, axes), carry))


_BY_NAME: dict[str, Callable[[], Reduction]] = {"psum": psum}


def make_reduction(all_reduce: str | Reduction) -> Reduction:
    """An all-reduce algorithm by name, or the given one.

    Args:
        all_reduce: a name, or a `Reduction` of your own.

    Raises:
        StrategyError: the name is not known, or the value is neither a name nor a `Reduction`.
    """
    if isinstance(all_reduce, Reduction):
        return all_reduce
    if isinstance(all_reduce, str) and all_reduce in _BY_NAME:
        return _BY_NAME[all_reduce]()
    raise StrategyError(
        f"`all_reduce` is {all_reduce!r}; allowed are the names {', '.join(map(repr, _BY_NAME))} and a "
        "`jdist.reduction.Reduction(name, init, apply)` of your own."
    )
