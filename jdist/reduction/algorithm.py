"""The interface of an all-reduce algorithm, and XLA's own as the plainest of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist.errors import StrategyError
from jdist.typing import PyTree


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
    """Counts the replicas on mesh axes that are bound."""
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def apply_reduction(reduction: Reduction, tree: PyTree, carry: PyTree, axes: tuple[str, ...]) -> tuple[PyTree, PyTree]:
    """Calls an algorithm, perhaps a user's own, and checks its result `(summed tree, carry)`."""
    result = reduction.apply(tree, carry, axes)
    if not isinstance(result, tuple) or len(result) != 2:
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise StrategyError(
            f"all-reduce {reduction.name}: `apply(tree, carry, axes)` returned {got}; it must return the pair "
            "`(sums, carry)`. Return the carry it was given, `()`, where nothing is kept."
        )
    for name, wanted, returned in (("sums", jax.tree.map(_summed, tree), result[0]), ("carry", carry, result[1])):
        difference = _difference(wanted, returned)
        if difference:
            raise StrategyError(
                f"all-reduce {reduction.name}: `apply(tree, carry, axes)` returned {name} of another form than the "
                f"{'tree' if name == 'sums' else name} it was given: {difference}. Return the same tree, shapes and dtypes."
            )
    return result


def _summed(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.int32 if x.dtype == jnp.bool_ else x.dtype)


def _difference(wanted: PyTree, returned: PyTree) -> str:
    """Describes the first difference between two trees; empty for equal ones."""
    if jax.tree.structure(wanted) != jax.tree.structure(returned):
        return f"{jax.tree.structure(returned)!s:.200} instead of {jax.tree.structure(wanted)!s:.200}"
    for (path, want), got in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(returned), strict=True):
        kinds = [f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in (want, got)]
        if kinds[0] != kinds[1]:
            return f"leaf {jax.tree_util.keystr(path) or 'itself'} is {kinds[1]} instead of {kinds[0]}"
    return ""


def keeping_nothing(
    name: str, total: Callable[[PyTree, tuple[str, ...]], PyTree], *, num_replicas: int | None = None
) -> Reduction:
    """Makes a Reduction without a carry of a function `(tree, axes) -> sum`."""
    return Reduction(
        name, lambda tree: (), lambda tree, carry, axes: (total(tree, axes), carry), num_replicas=num_replicas
    )


def psum() -> Reduction:
    """Sums by one `lax.psum` of the whole tree; XLA picks the algorithm (NCCL, ICI) and combines the leaves.

    Example:
        >>> import jdist
        >>> jdist.reduction.psum().name
        'psum'
    """

    def total(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
        if axes_size(axes) > 1:
            return jax.lax.psum(tree, axes)
        # XLA on CPU would copy twice what a single device sums. These are new arrays to JAX, and none to XLA.
        return jax.tree.map(lambda x: jnp.array(x, jnp.int32 if jnp.result_type(x) == jnp.bool_ else None), tree)

    return keeping_nothing("psum", total)
