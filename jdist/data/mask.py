"""How many rows of a batch are real: remembered beside its mask, as a weight of zero there need not mean padding."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jdist.data.batching import Masked
from jdist.data.leaves import MASK
from jdist.support.arrays import to_host

PyTree = Any

# By the id of the mask, for as long as it lives. A batch stays a plain tree, and the mask goes with it when a user
# replaces other leaves.
_real_rows: dict[int, tuple[weakref.ref[Any], tuple[int, ...], int]] = {}


def remember_real_rows(batch: PyTree, sizes: tuple[int, ...], rows: int | None = None) -> None:
    """Notes of a batch how many of the rows that each process feeds are real; what fills them up comes behind.

    Args:
        batch: what `fit` returned, perhaps on devices now; without a mask it has no padding.
        sizes: how many rows the source gave to each process.
        rows: how many each process feeds, those that fill up too; None: the mask's first axis tells.
    """
    mask = _mask_of(batch)
    if mask is not None:
        rows = len(mask) // len(sizes) if rows is None else rows
        key = id(mask)
        _real_rows[key] = weakref.ref(mask, lambda _: _real_rows.pop(key, None)), sizes, rows


def hand_on_real_rows(before: PyTree, after: PyTree) -> None:
    """Notes of a batch what is known of the one that it was made from, on its way to the devices."""
    known = _known(before)
    if known is not None:
        remember_real_rows(after, *known[1:])


def real_rows(batch: PyTree, turn: Callable[[PyTree], PyTree] = lambda batch: batch) -> np.ndarray | None:
    """Which rows of a batch are no padding.

    Args:
        batch: leaves [rows, ...], or with rows where `turn` knows.
        turn: gives a batch with its rows first.

    Returns:
        bool [rows]: False where `distribute_dataset` has filled up. Without a mask from there it is False where the
        batch's own mask is zero, as nothing else tells. None without any mask: there is no padding.
    """
    rows = filled_up(batch)
    if rows is not None:
        return rows
    mask = None if _mask_of(batch) is None else _mask_of(turn(batch))
    return None if mask is None else np.any(to_host(mask).reshape(len(mask), -1) != 0, axis=1)


def filled_up(batch: PyTree) -> np.ndarray | None:
    """As `real_rows`, of a batch that `distribute_dataset` made; None of any other, whatever its own mask says."""
    known = _known(batch)
    if known is None:
        return None
    _, sizes, each = known
    own = np.arange(each)
    return np.concatenate([own < size for size in sizes])


def full_mask_place(batch: PyTree) -> int | None:
    """Which of a batch's leaves is the mask that `distribute_dataset` gave it, if all of its rows are real."""
    known = _known(batch)
    if known is None or not np.all(to_host(known[0])):
        return None
    return next(i for i, leaf in enumerate(jax.tree.leaves(batch)) if leaf is known[0])


def _known(batch: PyTree) -> tuple[Any, tuple[int, ...], int] | None:
    """The mask in a batch of which something was noted, how many rows of each process are real, and how many it has."""
    for leaf in jax.tree.leaves(batch):
        found = _real_rows.get(id(leaf))
        if found is not None and found[0]() is leaf:  # else the id was that of an array which is gone
            return leaf, *found[1:]
    return None


def _mask_of(batch: PyTree) -> jax.Array | np.ndarray | None:
    """A dict's "mask" leaf, or the second of the `(batch, mask)` that `with_mask` gives."""
    mask = batch.get(MASK) if isinstance(batch, dict) else batch.mask if isinstance(batch, Masked) else None
    return mask if isinstance(mask, jax.Array | np.ndarray) else None
