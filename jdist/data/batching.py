"""Shapes of batches: pure functions that check a global batch, fill it up and mask the filling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np

from jdist.data.leaves import MASK, LeafSpec, count_rows, leaf_specs, to_numpy
from jdist.data.share import WHOLE, Part, Share
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
        global_batch: rows of a full batch as the source gives it.
        rows: rows of every batch as the step receives it; a multiple of `num_replicas`.
        num_replicas: how many replicas share the rows.
        partial: what happens to a batch of fewer than `global_batch` rows.
        with_mask: whether trees that are not dicts become `(batch, mask)`.
        share: this process's part of a batch.
        leaves: path, shape without the batch axis and dtype of each leaf, as the source gives it.
        structure: the tree of those leaves, a `PyTreeDef`.
        is_dict: whether the tree is a dict at its top and so carries its mask in itself.
    """

    global_batch: int
    rows: int
    num_replicas: int
    partial: Partial
    with_mask: bool
    leaves: tuple[LeafSpec, ...]
    structure: Any
    is_dict: bool
    share: Share = WHOLE

    @property
    def own_rows(self) -> int:
        """Rows of every batch that this process makes."""
        return self.rows // self.share.count


def plan_layout(
    batch: PyTree,
    *,
    global_batch: int | None,
    num_replicas: int,
    partial: Partial,
    with_mask: bool,
    share: Share = WHOLE,
) -> BatchLayout:
    """Settles what every batch of a dataset looks like from one of them.

    Args:
        batch: a batch as the source gives it.
        global_batch: rows of a full batch; None takes this batch's rows.
        num_replicas: how many replicas share the rows.
        partial: what happens to a batch of fewer than `global_batch` rows.
        with_mask: whether trees that are not dicts become `(batch, mask)`.
        share: this process's part of a batch.

    Returns:
        The layout, for `fit`.

    Raises:
        BatchError: the batch is not a tree of arrays, or `global_batch` does not divide by `num_replicas`
            where `partial` leaves no room for padding.
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
    size = count_rows(batch) if global_batch is None else global_batch
    if partial == "pad":
        rows = -(-size // num_replicas) * num_replicas
    else:
        rows = check_divisible(size, num_replicas=num_replicas, partial=partial)
    return BatchLayout(
        global_batch=size,
        rows=rows,
        num_replicas=num_replicas,
        partial=partial,
        with_mask=with_mask,
        leaves=leaf_specs(batch),
        structure=jax.tree.structure(batch),
        is_dict=is_dict,
        share=share,
    )


def check_divisible(global_batch: int, *, num_replicas: int, partial: Partial) -> int:
    """`global_batch` if it divides by `num_replicas`, else a `BatchError` with the nearest sizes that do."""
    below = global_batch // num_replicas * num_replicas
    if below == global_batch:
        return global_batch
    above = below + num_replicas
    nearest = f"{below} or {above}" if below else f"{above}"
    raise BatchError(
        f"a global batch of {global_batch} rows does not divide by {num_replicas} replicas, and "
        f'partial={partial!r} allows no padding; use a global batch of {nearest}, or partial="pad"'
    )


def fit(layout: BatchLayout, part: Part, *, copy: bool) -> PyTree | None:
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
    _check_same(layout, batch)
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

    tree = layout.structure.unflatten([spec(leaf.shape, leaf.dtype) for leaf in layout.leaves])
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


def _check_same(layout: BatchLayout, batch: PyTree) -> None:
    leaves = leaf_specs(batch)
    if jax.tree.structure(batch) == layout.structure and leaves == layout.leaves:
        return
    before, now = {leaf.path: leaf for leaf in layout.leaves}, {leaf.path: leaf for leaf in leaves}
    changes = [f"{path} is missing" for path in before if path not in now]
    changes += [f"{path} is new" for path in now if path not in before]
    for path in before.keys() & now.keys():
        if before[path] != now[path]:
            changes.append(f"{path} was {before[path]!s} and is {now[path]!s}")
    if not changes:
        changes.append(f"its tree was {layout.structure} and is {jax.tree.structure(batch)}")
    raise BatchError(
        f"a batch differs from the first one: {'; '.join(sorted(changes))}. All batches of a dataset need "
        "one structure, one dtype a leaf and one shape a row: pad or crop rows in the source"
    )
