"""Shapes of batches: pure functions that check a global batch, fill it up and mask the filling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np

from jdist.data.leaves import MASK, TreeSpec, check_same, to_numpy, tree_spec
from jdist.data.process_shard import WHOLE, LocalRows, ProcessShard
from jdist.errors import BatchError

PyTree = Any
Partial = Literal["pad", "drop", "error"]
PARTIALS: tuple[str, ...] = get_args(Partial)


class Masked(NamedTuple):
    """A batch that is no dict, with its mask; a step takes it as the pair `(batch, mask)`."""

    batch: PyTree
    mask: Any


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """What every batch of a dataset looks like, as its first batch and the options settle it.

    Attributes:
        full: how many rows of a full batch each process has.
        rows: rows of every batch as the step receives it; a multiple of `num_replicas`.
        num_replicas: how many replicas share the rows.
        partial: what happens to a batch of fewer than `global_batch` rows.
        with_mask: whether trees that are not dicts become `(batch, mask)`.
        share: this process's part of a batch.
        tree: what the source's batches look like, but for their rows.
        is_dict: whether the tree is a dict at its top and so carries its mask in itself.
    """

    full: tuple[int, ...]
    rows: int
    num_replicas: int
    partial: Partial
    with_mask: bool
    tree: TreeSpec
    is_dict: bool
    share: ProcessShard = WHOLE

    @property
    def global_batch(self) -> int:
        """Rows of a full batch as the sources give it."""
        return sum(self.full)

    @property
    def own_rows(self) -> int:
        """Rows of every batch that this process makes."""
        return self.rows // self.share.count


def plan_layout(
    batch: PyTree,
    *,
    full: tuple[int, ...],
    num_replicas: int,
    partial: Partial,
    with_mask: bool,
    share: ProcessShard = WHOLE,
) -> BatchLayout:
    """Settles what every batch of a dataset looks like from one of them.

    Args:
        batch: a batch as the source gives it.
        full: how many rows of a full batch each process has.
        num_replicas: how many replicas share the rows.
        partial: what happens to a batch of fewer rows.
        with_mask: whether trees that are not dicts become `(batch, mask)`.
        share: this process's part of a batch.

    Returns:
        The layout, for `fit`.

    Raises:
        BatchError: the batch is not a tree of arrays, or a full one does not divide by `num_replicas` where
            `partial` leaves no room for padding.
    """
    batch = to_numpy(batch)
    is_dict = isinstance(batch, dict)
    if is_dict and not all(isinstance(key, str) for key in batch):
        raise BatchError(
            f"a dict batch gains the leaf `mask`, so its keys must be strings, but they are {list(batch)!r}"
        )
    if is_dict and MASK in batch and not isinstance(batch[MASK], np.ndarray):
        raise BatchError(
            f"the batch's own `mask` must be one array of shape [rows, ...], but it is a "
            f"{type(batch[MASK]).__name__}; rename it if it means something else"
        )
    if partial != "pad":
        check_divisible(full, num_replicas=num_replicas, partial=partial)
    return BatchLayout(
        full=full,
        rows=padded_rows(full, num_replicas=num_replicas),
        num_replicas=num_replicas,
        partial=partial,
        with_mask=with_mask,
        tree=tree_spec(batch),
        is_dict=is_dict,
        share=share,
    )


def padded_rows(full: tuple[int, ...], *, num_replicas: int) -> int:
    """Rows of every batch as the replicas of all processes receive it.

    Args:
        full: how many rows of a full batch each process has.
        num_replicas: how many replicas all processes have, each as many.

    Example:
        >>> from jdist.data.batching import padded_rows
        >>> padded_rows((3, 5), num_replicas=4)  # a process has 2 of them; for 5 rows each of these needs 3
        12
    """
    each = num_replicas // len(full)
    return -(-max(full) // each) * num_replicas


def check_divisible(full: tuple[int, ...], *, num_replicas: int, partial: Partial) -> None:
    """Refuses full batches that need padding.

    Args:
        full: how many rows of a full batch each process has.
        num_replicas: how many replicas share them.
        partial: why there may be no padding.

    Raises:
        BatchError: with the nearest sizes that do.
    """
    global_batch = sum(full)
    below = global_batch // num_replicas * num_replicas
    if below != global_batch:
        nearest = f"{below} or {below + num_replicas}" if below else f"{num_replicas}"
        raise BatchError(
            f"a global batch of {global_batch} rows does not divide by {num_replicas} replicas, and "
            f'partial={partial!r} allows no padding; use a global batch of {nearest}, or partial="pad"'
        )
    if padded_rows(full, num_replicas=num_replicas) != global_batch:
        raise BatchError(
            f"the processes have {', '.join(map(str, full))} rows of a full batch, and partial={partial!r} allows no "
            'padding; let all have as many, or use partial="pad"'
        )


def fit(layout: BatchLayout, part: LocalRows, *, copy: bool) -> PyTree | None:
    """This process's part of a batch in the shape that the step receives.

    Args:
        layout: what batches look like, from `plan_layout`.
        part: rows of a batch as the source gives it.
        copy: copy leaves that would otherwise share memory with those of `part`.

    Returns:
        The batch with leaves [layout.own_rows, ...] and its mask: as the `mask` leaf of a dict, else beside it
        under `with_mask`. Padding rows repeat the real rows in turn, so that they bring no NaN, and are
        masked False; a `mask` that the batch brought itself is filled up with zeros. None for a batch
        without rows, and for one that `partial="drop"` leaves out.

    Raises:
        BatchError: the batch differs from the layout, or is short where that is not allowed.
    """
    batch, found, real = part.batch, sum(part.sizes), part.sizes[layout.share.index]
    if found == 0:
        return None
    check_same(layout.tree, tree_spec(batch))
    if found > layout.global_batch:
        raise BatchError(
            f"a batch has {found} rows, but a full batch has {layout.global_batch}; a larger one would "
            "compile the step again. Let the source give its largest batch first, or split this one"
        )
    if found < layout.global_batch and layout.partial == "drop":
        return None
    if found < layout.global_batch and layout.partial == "error":
        raise BatchError(
            f'a batch has {found} rows instead of {layout.global_batch}, and partial="error" refuses that; '
            'use partial="pad" (fills it up and masks the filling) or partial="drop" (leaves it out)'
        )
    if found < layout.rows and not (layout.is_dict or layout.with_mask):
        raise BatchError(
            f"a batch has {found} rows and needs {layout.rows} for {layout.num_replicas} replicas, but "
            f"this {type(batch).__name__} has no place for the mask that tells padding from real rows. "
            "Choose: with_mask=True (the step receives `(batch, mask)`), batches that are dicts (they "
            'gain a `mask` leaf), or partial="drop" with a global batch that divides by '
            f"{layout.num_replicas}"
        )
    rows = layout.own_rows
    mask = np.arange(rows) < real
    if layout.is_dict:
        if MASK in batch:
            mask = _fill(batch[MASK][:real], rows, copy=copy, repeat=False)
        rest = {key: leaf for key, leaf in batch.items() if key != MASK}
        return {**jax.tree.map(lambda leaf: _fill(leaf, rows, copy=copy), rest), MASK: mask}
    filled = jax.tree.map(lambda leaf: _fill(leaf, rows, copy=copy), batch)
    return Masked(filled, mask) if layout.with_mask else filled


def stack(batches: Sequence[PyTree]) -> PyTree:
    """Batches with leaves [rows, ...] as one with leaves [steps, rows, ...]; always a copy."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


def element_spec(layout: BatchLayout, *, steps_per_call: int) -> PyTree:
    """Shapes and dtypes of what the step receives, over all replicas.

    Args:
        layout: what batches look like, from `plan_layout`.
        steps_per_call: more than 1 adds a leading axis of that size.

    Returns:
        A pytree of `jax.ShapeDtypeStruct`; dtypes are those on a device (float64 only if jax has x64
        enabled).
    """
    head = (layout.rows,) if steps_per_call == 1 else (steps_per_call, layout.rows)

    def spec(shape: tuple[int, ...], dtype: np.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(head + shape, jax.dtypes.canonicalize_dtype(dtype))

    tree = layout.tree.structure.unflatten([spec(leaf.shape, leaf.dtype) for leaf in layout.tree.leaves])
    mask = spec((), np.dtype(np.bool_))
    if layout.is_dict:
        return {MASK: mask, **tree}
    return Masked(tree, mask) if layout.with_mask else tree


def _fill(leaf: np.ndarray, rows: int, *, copy: bool, repeat: bool = True) -> np.ndarray:
    found = leaf.shape[0]
    if found == rows:
        return np.array(leaf, order="C") if copy else leaf
    filled = np.empty((rows, *leaf.shape[1:]), leaf.dtype)
    filled[:found] = leaf
    filled[found:] = leaf[np.arange(rows - found) % found] if repeat else np.zeros((), leaf.dtype)
    return filled
