"""Preparation of batches for the devices: checks, padding and masks, and which rows of a batch are real."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist.data.leaves import (
    MASK,
    TreeSpec,
    check_fits,
    check_rows,
    check_same,
    count_rows,
    leaves_by_path,
    to_numpy,
    tree_spec,
)
from jdist.data.options import FeedOptions
from jdist.data.position import LocalRows, Numbered, Part, Place
from jdist.errors import BatchError
from jdist.support.arrays import to_host
from jdist.typing import PyTree


class Masked(NamedTuple):
    """A batch that is not a dict, with its mask; a step takes it as the pair `(batch, mask)`."""

    batch: PyTree
    mask: Any


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """The shape of every batch of a dataset, by its first batch and the options."""

    options: FeedOptions
    full: tuple[int, ...]  # rows of a full batch by process
    rows: int  # rows that the step receives; a multiple of `num_replicas`
    tree: TreeSpec  # the source's batches, without their rows
    # the mask becomes a leaf of the batch; else it is separate, or missing
    is_dict: bool
    copy: bool = True  # the source may reuse or keep the memory of its batches

    @property
    def global_batch(self) -> int:
        """Rows of a full batch as the sources give it."""
        return sum(self.full)


class Shapes:
    """The shapes of a dataset's batches, at most `limit`, each with the rows that its batches are filled up to."""

    def __init__(self, limit: int):
        self.limit = limit
        self.known: list[tuple[str, int]] = []

    def rows_of(self, batch: PyTree, number: int) -> int:
        """Finds the rows of a full batch of this one's shape, which is new if none that is known has room for it."""
        rows, spec = count_rows(batch), tree_spec(batch)
        shape = "; ".join([*(f"{leaf.path} {leaf}" for leaf in spec.leaves), str(spec.structure)])
        with_room = [most for known, most in self.known if known == shape and most >= rows]
        if with_room:
            return min(with_room)
        if len(self.known) == self.limit:
            leaves = ", ".join(f"{leaf.path} {leaf}" for leaf in spec.leaves)
            raise BatchError(
                f"batch {number:,} (from 0), {rows} rows of {leaves}, has one shape more than `shapes={self.limit}` allows. "
                "Raise `shapes`, or let the source pad to fewer shapes and give the largest batch of each first"
            )
        self.known.append((shape, rows))
        return rows


def plan_layout(batch: PyTree, full: tuple[int, ...], options: FeedOptions, *, copy: bool = True) -> BatchLayout:
    """Makes the layout of a dataset's batches; `full` has the rows of a full one by process."""
    batch = to_numpy(batch)
    is_dict = isinstance(batch, dict) and not options.with_mask
    if is_dict and not all(isinstance(key, str) for key in batch):
        raise BatchError(
            f"a dict batch gains the leaf `mask`, so its keys must be strings, but they are {list(batch)!r}"
        )
    if is_dict and MASK in batch:
        own = leaves_by_path({MASK: batch[MASK]})
        raise BatchError(
            f"the batch has a leaf `mask` of its own ({', '.join(own.values())}), where `distribute_dataset` puts the mask of "
            "real rows. Rename the leaf, or pass `with_mask=True`: the step then receives `(batch, mask)`"
        )
    check_divisible(full, options)
    rows = padded_rows(full, num_replicas=options.num_replicas)
    return BatchLayout(options=options, full=full, rows=rows, tree=tree_spec(batch), is_dict=is_dict, copy=copy)


def padded_rows(full: tuple[int, ...], *, num_replicas: int) -> int:
    """Counts the padded rows of a global batch; `full` has the rows by process."""
    each = num_replicas // len(full)
    # With 4 replicas, (3, 5) becomes 12: two replicas share 5 rows, so each has 3.
    return -(-max(full) // each) * num_replicas


def check_divisible(full: tuple[int, ...], options: FeedOptions) -> None:
    """Raises a `BatchError` for full batches that need padding where `partial` allows none; `full` are the rows by process."""
    if options.partial == "pad":
        return
    global_batch, num_replicas = sum(full), options.num_replicas
    below = global_batch // num_replicas * num_replicas
    if below != global_batch:
        nearest = f"{below} or {below + num_replicas}" if below else f"{num_replicas}"
        raise BatchError(
            f"a global batch of {global_batch} rows does not divide by {num_replicas} replicas, and "
            f'partial={options.partial!r} allows no padding; use a global batch of {nearest}, or partial="pad"'
        )
    if padded_rows(full, num_replicas=num_replicas) != global_batch:
        raise BatchError(
            f"the processes have {', '.join(map(str, full))} rows of a full batch, and partial={options.partial!r} allows no "
            'padding; give all the same number, or use partial="pad"'
        )


def fit(layout: BatchLayout, part: LocalRows) -> PyTree | None:
    """Pads this process's part of a batch and adds its mask; None if it has no rows to keep."""
    # The mask stands next to the batch under `with_mask`, else it is the `mask` leaf of a dict.
    # Padding repeats the real rows in turn, which brings no NaN, and is masked False.
    batch, options = part.batch, layout.options
    rows, num_real = sum(part.sizes), part.sizes[options.share.index]
    if rows == 0:
        return None
    check_same(layout.tree, batch)
    check_rows(rows, layout.global_batch, "a full batch")
    if rows < layout.global_batch and options.partial == "drop":
        return None
    if rows < layout.global_batch and options.partial == "error":
        raise BatchError(
            f'a batch has {rows} rows instead of {layout.global_batch}, and partial="error" refuses that; '
            'use partial="pad" (fills it up and masks the filling) or partial="drop" (leaves it out)'
        )
    if rows < layout.rows and not (layout.is_dict or options.with_mask):
        raise BatchError(
            f"a batch has {rows} rows and needs {layout.rows} for {options.num_replicas} replicas, but this "
            f"{type(batch).__name__} has no place for the mask of real rows. Use with_mask=True (the step receives "
            '`(batch, mask)`), a dict (it gains a `mask` leaf), or partial="drop" with a global batch that divides'
        )
    local_rows = layout.rows // options.share.count
    mask = (np.arange(local_rows) < num_real).view(RowMask)
    mask.jdist_real_rows = part.sizes, local_rows
    filled = jax.tree.map(lambda leaf: _fill(leaf, local_rows, copy=layout.copy), batch)
    if layout.is_dict:
        return {**filled, MASK: mask}
    return Masked(filled, mask) if options.with_mask else filled


def prepare(parts: Iterator[Part | None], layout: BatchLayout) -> Generator[Numbered | None]:
    """Fits, stacks and places batches; yields each with the place behind it."""
    # None comes where a wait for other processes was stopped; the next item continues. The
    # generator holds no reference to its consumer, so a thread that runs it does not keep the
    # consumer alive.
    options = layout.options
    group: list[PyTree] = []
    place = Place()
    # `fit` copies before the source is asked again, which may refill the same memory.
    layouts = {(layout.tree, layout.full): layout}
    for each in parts:
        if each is None:
            yield None
            continue
        place, part = each
        try:
            if options.shapes > 1:
                shape = tree_spec(part.batch), part.full
                if shape not in layouts:
                    layouts[shape] = plan_layout(part.batch, part.full, options, copy=layout.copy)
                layout = layouts[shape]
            fitted = fit(layout, part)
            check_fits(fitted)
        except BatchError as error:
            error.add_note(f"in batch {place.step - 1:,} (from 0) of the pass")
            raise
        if fitted is None:
            continue
        group.append(fitted)
        if len(group) == options.steps_per_call:
            yield place, _placed(group, options)
            group = []
    if group:
        yield place, _placed(group, options)


def _placed(group: list[PyTree], options: FeedOptions) -> PyTree:
    batch = group[0] if options.steps_per_call == 1 else stack(group)
    return put(batch, options.place) if options.place is not None and options.input.prefetch_to_device else batch


def put(batch: PyTree, place: Callable[[PyTree], PyTree]) -> PyTree:
    """Puts a batch where `place` does; its mask stays known as the one of jdist."""
    placed = place(batch)
    hand_on_real_rows(batch, placed)
    return placed


def stack(batches: Sequence[PyTree]) -> PyTree:
    """Stacks batches with leaves [rows, ...] to one with leaves [steps, rows, ...]; always a copy."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


def element_spec(layout: BatchLayout) -> PyTree:
    """Describes what the step receives, over all replicas, with dtypes as on a device (float64 only with JAX's x64)."""
    steps = layout.options.steps_per_call
    head = (layout.rows,) if steps == 1 else (steps, layout.rows)

    def spec(shape: tuple[int, ...], dtype: np.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(head + shape, jax.dtypes.canonicalize_dtype(dtype))

    tree = layout.tree.structure.unflatten([spec(leaf.shape, leaf.dtype) for leaf in layout.tree.leaves])
    mask = spec((), np.dtype(np.bool_))
    if layout.is_dict:
        return {MASK: mask, **tree}
    return Masked(tree, mask) if layout.options.with_mask else tree


def _fill(leaf: np.ndarray, rows: int, *, copy: bool) -> np.ndarray:
    num_real = leaf.shape[0]
    if num_real == rows:
        return np.array(leaf, order="C") if copy else leaf
    filled = np.empty((rows, *leaf.shape[1:]), leaf.dtype)
    filled[:num_real] = leaf
    filled[num_real:] = leaf[np.arange(rows - num_real) % num_real]
    return filled


class RowMask(np.ndarray):
    """A mask on the host that takes the number of real rows along into other trees."""

    # Real rows by process, padding follows them; and the rows that each process feeds, padding included.
    jdist_real_rows: tuple[tuple[int, ...], int] | None = None


def hand_on_real_rows(before: PyTree, after: PyTree) -> None:
    """Gives the mask of a batch on the devices the field of the mask on the host that it was made of."""
    marked, mask = _marked(before), mask_of(after)
    if marked is not None and isinstance(mask, jax.Array | RowMask):
        mask.jdist_real_rows = marked.jdist_real_rows  # type: ignore[union-attr]  # a `jax.Array` takes fields


def real_rows(batch: PyTree, turn: Callable[[PyTree], PyTree] = lambda batch: batch) -> np.ndarray | None:
    """Finds the real rows of a batch, bool [rows]; None without a mask, which means no padding."""
    rows = filled_up(batch)
    if rows is not None:
        return rows
    # `turn` moves the rows to the first axis.
    mask = None if mask_of(batch) is None else mask_of(turn(batch))
    return to_host(mask) if mask is not None and mask.ndim == 1 else None


def filled_up(batch: PyTree) -> np.ndarray | None:
    """Finds the real rows of a batch that `distribute_dataset` made; None for any other, whatever its mask."""
    if (mask := _marked(batch)) is None:
        return None
    sizes, fed = mask.jdist_real_rows
    return np.concatenate([np.arange(fed) < size for size in sizes])


def has_padding(batch: PyTree) -> bool:
    """Returns whether `distribute_dataset` filled a batch up."""
    if (mask := _marked(batch)) is None:
        return False
    sizes, fed = mask.jdist_real_rows
    return min(sizes) < fed


def full_mask_place(batch: PyTree) -> int | None:
    """Finds the number of the leaf that is the mask of `distribute_dataset`, if all rows are real."""
    mask = _marked(batch)
    if mask is None or not np.all(to_host(mask)):
        return None
    return next(i for i, leaf in enumerate(jax.tree.leaves(batch)) if leaf is mask)


def _marked(batch: PyTree) -> Any:
    """Finds the mask of `distribute_dataset` among the leaves of a batch, wherever the user has put it."""
    for leaf in jax.tree.leaves(batch):  # of every call of a step: a generator takes twice as long
        if getattr(leaf, "jdist_real_rows", None) is not None:
            return leaf
    return None


def mask_of(batch: PyTree) -> jax.Array | np.ndarray | None:
    """Returns the mask of rows, bools, of a dict or of the `(batch, mask)` of `with_mask`; None if its place holds no bools."""
    mask = batch.get(MASK) if isinstance(batch, Mapping) else batch.mask if isinstance(batch, Masked) else None
    return mask if isinstance(mask, jax.Array | np.ndarray) and mask.dtype == np.bool_ else None
