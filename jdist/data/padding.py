"""How many rows of a batch are real: remembered beside its mask, as a weight of zero there need not mean padding."""

from __future__ import annotations

import weakref
from typing import Any

import jax
import numpy as np

from jdist.data.batching import Masked
from jdist.data.leaves import MASK

PyTree = Any

# By the id of the mask, for as long as it lives. A batch stays a plain tree, and the mask goes with it when a user
# replaces other leaves.
_real_rows: dict[int, tuple[weakref.ref[Any], int]] = {}


def remember_real_rows(batch: PyTree, rows: int) -> None:
    """Notes of a batch that its first `rows` rows are real; those that fill it up are at its end.

    Args:
        batch: what `fit` returned, perhaps on devices now; without a mask it has no padding.
        rows: how many rows the source gave.
    """
    mask = _mask_of(batch)
    if mask is not None:
        key = id(mask)
        _real_rows[key] = weakref.ref(mask, lambda _: _real_rows.pop(key, None)), rows


def hand_on_real_rows(before: PyTree, after: PyTree) -> None:
    """Notes of a batch what is known of the one that it was made from, on its way to the devices."""
    known = _known(before)
    if known is not None:
        remember_real_rows(after, known[1])


def real_rows(batch: PyTree) -> np.ndarray | None:
    """Which rows of a batch are no padding.

    Args:
        batch: leaves [rows, ...].

    Returns:
        bool [rows]: False where `distribute_dataset` has filled up. Without a mask from there it is False where the
        batch's own mask is zero, as nothing else tells. None without any mask: there is no padding.
    """
    known = _known(batch)
    if known is not None:
        mask, rows = known
        return np.arange(len(mask)) < rows
    mask = _mask_of(batch)
    return None if mask is None else np.any(np.asarray(mask).reshape(len(mask), -1) != 0, axis=1)


def _known(batch: PyTree) -> tuple[Any, int] | None:
    """The mask in a batch of which something was noted, and how many of its rows are real."""
    for leaf in jax.tree.leaves(batch):
        mask, rows = _real_rows.get(id(leaf), (None, 0))
        if mask is not None and mask() is leaf:  # else the id was that of an array which is gone
            return leaf, rows
    return None


def _mask_of(batch: PyTree) -> jax.Array | np.ndarray | None:
    """A dict's "mask" leaf, or the second of the `(batch, mask)` that `with_mask` gives."""
    mask = batch.get(MASK) if isinstance(batch, dict) else batch.mask if isinstance(batch, Masked) else None
    return mask if isinstance(mask, jax.Array | np.ndarray) else None
