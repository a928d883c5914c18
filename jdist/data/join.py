"""The rows of several batches as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdist.data.leaves import count_rows, tree_spec
from jdist.errors import BatchError

PyTree = Any


def join(batches: Sequence[PyTree]) -> PyTree:
    """The rows of several batches one after the other, as one new batch.

    Args:
        batches: trees of numpy arrays [rows, ...], alike but for the rows.

    Returns:
        A tree that shares no memory with them.

    Raises:
        BatchError: they are not alike.

    Example:
        >>> import numpy as np
        >>> from jdist.data.join import join
        >>> join([np.array([1, 2]), np.array([3])])
        array([1, 2, 3])
    """
    spec = tree_spec(batches[0])
    for number, batch in enumerate(batches):
        count_rows(batch)
        if tree_spec(batch) != spec:
            raise BatchError(
                f"batches whose rows are to be joined differ: the first has {_shown(batches[0])}, number {number} "
                f"(from 0) has {_shown(batch)}. All need one structure, one dtype a leaf and one shape a row"
            )
    return jax.tree.map(lambda *parts: np.concatenate(parts), *batches)


def _shown(batch: PyTree) -> str:
    return ", ".join(f"{leaf.path} {leaf!s}" for leaf in tree_spec(batch).leaves)
