"""Leaves of batches: checks, descriptions, rows, and the join of several batches."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist.errors import BatchError
from jdist.typing import PyTree

MASK = "mask"
ROWS_REMEDY = (
    "Every leaf needs one row for each example. Pass an array without rows to the step as an argument of its own, with the "
    'role "replicated"; if the rows are on another axis, pass `batch_axis`'
)


@dataclass(frozen=True)
class LeafSpec:
    """One leaf of a batch without its batch axis."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.dtype}[rows{''.join(f', {size}' for size in self.shape)}]"


def to_numpy(tree: PyTree) -> PyTree:
    """Converts the leaves of a batch to numpy arrays; copies only if it must convert."""
    arrays, structure = jax.tree.flatten(tree)
    if arrays and all(map(_is_ready, arrays)):
        return structure.unflatten(arrays)
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    if not leaves:
        forgotten = "; the function that makes it must return it" if tree is None else ""
        raise BatchError(f"a batch must hold at least one array, but this one has no leaves: {tree!r}{forgotten}")
    return structure.unflatten([_leaf_to_numpy(_name(path), leaf) for path, leaf in leaves])


def _is_ready(leaf: Any) -> bool:
    return type(leaf) is np.ndarray and leaf.ndim > 0 and leaf.dtype.kind in "biufc" and leaf.dtype.isnative


def is_numeric(dtype: np.dtype) -> bool:
    """Returns whether a device can hold arrays of a numpy dtype: numbers (bfloat16 and the like too) and bools."""
    return jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)


def numbers_of(path: str, leaf: Any) -> np.ndarray:
    """Converts a leaf of a batch to a numpy array of numbers, under the name `path` in errors."""
    # Tables of Arrow have the one, those of pandas and Polars the other.
    columns = next((name for name in ("column_names", "columns") if hasattr(leaf, name)), None)
    if columns is not None:
        raise BatchError(
            f"batch leaf {path} is a table, a {type(leaf).__name__}. Make it a dict of arrays, "
            f"`{{name: table[name].to_numpy() for name in table.{columns}}}`"
        )
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BatchError(f"batch leaf {path} is a {type(leaf).__name__} that numpy cannot read: {error}") from error
    if not is_numeric(array.dtype):
        if unlike := _unlike_rows(array):
            raise BatchError(
                f"batch leaf {path} (a {type(leaf).__name__}) has dtype {array.dtype}, as its rows differ: {unlike}. "
                "Pad or crop all rows to one shape, and fill in what is missing"
            )
        raise BatchError(
            f"batch leaf {path} (a {type(leaf).__name__}) has dtype {array.dtype}, which a device cannot "
            "hold; turn it into arrays of numbers (token ids, an index) or leave it out of the batch"
        )
    return array


def _unlike_rows(array: np.ndarray) -> str | None:
    """Describes the first two rows of an object array that do not fit one array of numbers, or returns None."""
    if not array.dtype.hasobject or array.ndim != 1:
        return None
    rows = ["missing (None)" if row is None else f"of shape {np.shape(row)}" for row in array]
    other = next((number for number, row in enumerate(rows) if row != rows[0]), None)
    return None if other is None else f"row 0 of the batch is {rows[0]}, and row {other} {rows[other]}"


def _leaf_to_numpy(path: str, leaf: Any) -> np.ndarray:
    array = numbers_of(path, leaf)
    if array.ndim == 0:
        raise BatchError(
            f"batch leaf {path} is a single value ({array}); every leaf needs a leading batch axis. Make a list an array "
            "with `numpy.asarray`; put a constant into the step, or repeat it with `numpy.full(rows, value)`"
        )
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def check_fits(batch: PyTree) -> None:
    """Raises a `BatchError` for integers that would wrap round: JAX has 32 bits for those of 64, unless told otherwise."""
    for number, leaf in enumerate(jax.tree.leaves(batch)):
        if not (isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iu" and leaf.itemsize > 4 and leaf.size):
            continue
        kept = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if kept == leaf.dtype:
            continue
        least, most = int(leaf.min()), int(leaf.max())
        if least < np.iinfo(kept).min or most > np.iinfo(kept).max:
            wrong = most if most > np.iinfo(kept).max else least
            path, _ = jax.tree_util.tree_flatten_with_path(batch)[0][number]
            raise BatchError(
                f"batch leaf {_name(path)} has {wrong:,} in {leaf.dtype}, which JAX stores as {kept}, so it would become "
                'another number. Make it smaller, or set `jax.config.update("jax_enable_x64", True)`'
            )


def count_rows(tree: PyTree) -> int:
    """Counts the rows of a tree of numpy arrays [rows, ...]; refuses leaves that disagree."""
    counts = {leaf.shape[0] for leaf in jax.tree.leaves(tree)}
    if len(counts) == 1:
        (rows,) = counts
        check_static_parts(tree, rows)
        return rows
    sizes = {_name(path): leaf.shape[0] for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
    listed = ", ".join(f"{path}: {size}" for path, size in sizes.items())
    raise BatchError(
        f"the leaves of a batch must agree on their leading (batch) axis, but have rows {listed}. {ROWS_REMEDY}"
    )


def check_static_parts(batch: PyTree, rows: int) -> None:
    """Raises a `BatchError` for a node (a `BCOO`) with the number of rows in its static part: cuts miss it."""
    treedef = jax.tree.structure(batch)
    if not _holds(treedef, rows):
        return

    def holds(node: Any) -> bool:
        return _holds_itself(jax.tree.structure(node), rows)

    numbered = treedef.unflatten(range(treedef.num_leaves))
    path, node = next(item for item in jax.tree_util.tree_leaves_with_path(numbered, is_leaf=holds) if holds(item[1]))
    raise BatchError(
        f"batch node {_name(path)} is a {type(node).__name__}, a container with {rows}, the number of rows, in its static "
        f"part, which stays when its arrays are cut. Pass the arrays as leaves of a dict, and make the container in the step"
    )


def _holds(treedef: Any, rows: int) -> bool:
    return _holds_itself(treedef, rows) or any(_holds(child, rows) for child in treedef.children())


def _holds_itself(treedef: Any, rows: int) -> bool:
    """Returns whether the static part of a tree's topmost node has the number `rows`; the keys of a dict do not count."""
    kind, static = treedef.node_data() or (None, None)
    if kind in (None, dict, list, tuple, type(None), OrderedDict, defaultdict):
        return False
    return any(type(x) is int and x == rows for x in jax.tree.leaves(static))


class TreeSpec(NamedTuple):
    """The structure of a batch but for its rows; `structure` is a `PyTreeDef`."""

    leaves: tuple[LeafSpec, ...]
    structure: Any


def tree_spec(batch: PyTree) -> TreeSpec:
    """Describes a tree of numpy arrays but for its rows."""
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    specs = tuple(LeafSpec(_name(path), leaf.shape[1:], leaf.dtype) for path, leaf in leaves)
    return TreeSpec(specs, jax.tree.structure(batch))


def leaves_by_path(batch: PyTree) -> dict[str, str]:
    """Describes the dtype and shape of each leaf, by its path."""
    return {leaf.path: str(leaf) for leaf in tree_spec(batch).leaves}


def differences(first: TreeSpec, now: TreeSpec) -> str:
    """Names the leaves in which a tree differs from the first one; of equal trees nothing."""
    before, after = ({leaf.path: leaf for leaf in spec.leaves} for spec in (first, now))
    changes = [f"{path} is missing" for path in before if path not in after]
    changes += [f"{path} is new" for path in after if path not in before]
    changes += [f"{path} was {x} and is {after[path]}" for path, x in before.items() if after.get(path, x) != x]
    if not changes and first != now:
        changes.append(f"its tree was {first.structure} and is {now.structure}")
    return "; ".join(sorted(changes))


def check_same(first: TreeSpec, batch: PyTree) -> None:
    """Refuses a batch that does not look like the first one."""
    leaves, structure = jax.tree.flatten(batch)
    if structure == first.structure and all(
        leaf.dtype == spec.dtype and leaf.shape[1:] == spec.shape
        for leaf, spec in zip(leaves, first.leaves, strict=True)
    ):
        return
    now = tree_spec(batch)
    before = {leaf.path: leaf.dtype.kind for leaf in first.leaves}
    kinds = [{before.get(leaf.path), leaf.dtype.kind} for leaf in now.leaves]
    missing = " (a value that is missing makes floats of integers: fill it in)" if {"i", "f"} in kinds else ""
    raise BatchError(
        f"a batch differs from the first one: {differences(first, now)}. All batches of a dataset need "
        "one structure, one dtype a leaf and one shape a row: pad, crop or convert rows in the source, or say how many shapes "
        f"there are, `strategy.distribute_dataset(..., shapes=n)`{missing}"
    )


def check_rows(rows: int, most: int, full: str) -> None:
    """Raises a `BatchError` for a batch of more rows than those of `full`, such as "a full batch"."""
    if rows > most:
        raise BatchError(
            f"a batch has {rows} rows, but {full} has {most}; a larger one would compile the step again. Let the source give "
            "its largest batch first, or split this one"
        )


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path) or "(the batch itself)"


def join(batches: Sequence[PyTree]) -> PyTree:
    """Joins the rows of similar batches, without shared memory; refuses batches that differ."""
    first = tree_spec(batches[0])
    for number, batch in enumerate(batches):
        count_rows(batch)
        if (spec := tree_spec(batch)) != first:
            raise BatchError(
                f"cannot join the rows of batches that differ: in batch {number} (from 0) {differences(first, spec)}. All need "
                "one structure, one dtype a leaf and one shape a row"
            )
    return jax.tree.map(lambda *parts: np.concatenate(parts), *batches)
