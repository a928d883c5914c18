"""All-reduce as XLA does it."""

from __future__ import annotations

import jax

from jdist.reduction.algorithm import Reduction, keeping_nothing


def psum() -> Reduction:
    """One `lax.psum` of the whole tree; XLA picks the algorithm (NCCL, ICI) and combines the leaves.

    Example:
        >>> import jdist
        >>> jdist.reduction.psum().name
        'psum'
    """
    return keeping_nothing("psum", jax.lax.psum)
