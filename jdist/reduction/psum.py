"""All-reduce as XLA does it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jdist.reduction.algorithm import Reduction, axes_size, keeping_nothing

PyTree = Any


def psum() -> Reduction:
    """One `lax.psum` of the whole tree; XLA picks the algorithm (NCCL, ICI) and combines the leaves.

    Example:
        >>> import jdist
        >>> jdist.reduction.psum().name
        'psum'
    """

    def total(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
        if axes_size(axes) > 1:
            return jax.lax.psum(tree, axes)
        # XLA on CPU copies what a single device sums, twice. These are arrays of their own to JAX, and none to XLA.
        return jax.tree.map(lambda x: jnp.array(x, jnp.int32 if jnp.result_type(x) == jnp.bool_ else None), tree)

    return keeping_nothing("psum", total)
