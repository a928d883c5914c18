"""Batches with rows on another axis than the first.

Between a call and the user's step every batch has its rows first: its axes are moved when a program begins, and moved back
for the step itself. XLA removes a pair of moves with nothing between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.data.batching import Masked
from jdist.data.leaves import MASK, to_numpy
from jdist.data.options import FeedOptions
from jdist.errors import BatchError
from jdist.support.checks import as_int
from jdist.typing import PyTree

BatchAxis = Any  # an int, or a tree of them that a batch's tree begins with
Take = Callable[[PyTree], PyTree]  # makes numpy arrays of a source's batch, rows first


def is_first(batch_axis: BatchAxis) -> bool:
    """Returns whether rows are on the first axis of every leaf."""
    return as_int(batch_axis) == 0


def check_axes(batch_axis: BatchAxis, error: type[Exception]) -> None:
    """Raises `error` unless `batch_axis` is a tree of axes."""
    if not jax.tree.leaves(batch_axis, is_leaf=lambda x: x is None):
        raise error(
            f"`batch_axis` is {batch_axis!r}, which names no axis. Give the axis that rows are on, 0 for the first, or a tree "
            "with one for each part of the batch."
        )
    for path, axis in jax.tree_util.tree_leaves_with_path(batch_axis, is_leaf=lambda x: x is None):
        if as_int(axis, least=0) is None:
            raise error(
                f"`batch_axis` has {axis!r}{f' at {jax.tree_util.keystr(path)}' if path else ''}; it must be an integer of at "
                'least 0, or a tree of them as in `jax.vmap`\'s `in_axes`. Pass arrays without rows as "replicated".'
            )


def axes_of(batch: PyTree, batch_axis: BatchAxis) -> PyTree:
    """Finds the axis of the rows for each leaf of one batch, as a tree like the batch's."""
    if isinstance(batch, Masked):
        return Masked(axes_of(batch.batch, batch_axis), 0)
    names_mask = isinstance(batch_axis, dict) and MASK in batch_axis
    # A mask of one axis has one entry a row, whatever the other leaves look like.
    if isinstance(batch, dict) and np.ndim(batch.get(MASK, 0)) == 1 and not names_mask:
        rest = {key: value for key, value in batch.items() if key != MASK}
        return {**axes_of(rest, batch_axis), MASK: 0}
    try:
        return jax.tree.map(lambda axis, part: jax.tree.map(lambda _: axis, part), batch_axis, batch)
    except ValueError as exc:
        raise BatchError(
            f"`batch_axis` is {batch_axis!r}, which does not fit the tree of the batch, {jax.tree.structure(batch)}: {exc}. "
            "Give one axis for all leaves, or one for each part of the batch."
        ) from exc


def axes_of_leaves(batches: tuple[PyTree, ...], batch_axis: BatchAxis, *, lead: int = 0) -> tuple[int, ...]:
    """Lists the axis of the rows for each leaf of a call's batches; empty if all are 0."""
    if is_first(batch_axis):
        return ()
    # With several batches a tuple has one entry for each; an int is for all.
    each = (batch_axis,) * len(batches)
    if len(batches) > 1 and not isinstance(batch_axis, int):
        if not isinstance(batch_axis, tuple) or len(batch_axis) != len(batches):
            raise BatchError(
                f"`batch_axis` is {batch_axis!r}, and the step takes {len(batches)} batches: give an axis for all, or a tuple "
                "with one for each batch."
            )
        each = batch_axis
    axes: list[int] = []
    for batch, axis in zip(batches, each, strict=True):
        one_step = batch
        if lead:
            one_step = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x)[lead:], np.int8), batch)
        axes_of_batch = jax.tree.leaves(axes_of(one_step, axis))
        for (path, leaf), axis_of_leaf in zip(jax.tree_util.tree_leaves_with_path(batch), axes_of_batch, strict=True):
            if np.ndim(leaf) <= lead + axis_of_leaf:
                raise BatchError(
                    f"batch leaf {jax.tree_util.keystr(path) or 'itself'} has shape {np.shape(leaf)}, and its rows should be "
                    f"on axis {axis_of_leaf}{' after the axis of steps' if lead else ''}. Give `batch_axis` as a tree, as "
                    "`jax.vmap` takes for `in_axes`."
                )
        axes += axes_of_batch
    return tuple(axes)


def rows_first(batches: PyTree, axes: Sequence[int], *, lead: int = 0, shapes_only: bool = False) -> PyTree:
    """Moves the rows of batches to the first axis; `axes` is the result of `axes_of_leaves`."""
    if not axes:
        return batches

    def move(x: Any, axis: int) -> Any:
        if not shapes_only or isinstance(x, jax.ShapeDtypeStruct):
            return _move_axis(x, lead + axis, lead)
        dtype = x.dtype if isinstance(x, np.ndarray) else np.dtype(np.int8)
        shape = _move_axis(jax.ShapeDtypeStruct(np.shape(x), dtype), lead + axis, lead).shape
        return np.broadcast_to(np.zeros((), dtype), shape)

    return _map_leaves(move, batches, axes)


def rows_in_place(batches: PyTree, axes: Sequence[int], *, lead: int = 0) -> PyTree:
    """Undoes `rows_first`."""
    return _map_leaves(lambda x, axis: _move_axis(x, lead, lead + axis), batches, axes) if axes else batches


def _map_leaves(move: Callable[[Any, int], Any], batches: PyTree, axes: Sequence[int]) -> PyTree:
    leaves, treedef = jax.tree.flatten(batches)
    return jax.tree.unflatten(treedef, [move(x, axis) for x, axis in zip(leaves, axes, strict=True)])


def _move_axis(x: Any, source: int, destination: int) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        shape = list(x.shape)
        shape.insert(destination, shape.pop(source))
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)
    return (np if isinstance(x, np.ndarray) else jnp).moveaxis(x, source, destination)


def turn_back(batch: PyTree, batch_axis: BatchAxis, *, lead: int) -> tuple[PyTree, PyTree]:
    """Moves the rows of a source's batch back to where it had them; returns the batch and its axes."""
    # Leaves are [rows, ...], or [steps, rows, ...] with `lead=1`; the axes include `lead`.
    one_step = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[lead:], x.dtype), batch)
    axes = axes_of_leaves((one_step,), batch_axis)
    leaves, treedef = jax.tree.flatten(batch)
    places = [lead + axis for axis in axes or (0,) * len(leaves)]
    return rows_in_place(batch, axes, lead=lead), jax.tree.unflatten(treedef, places)


def taker(batch_axis: BatchAxis) -> Take:
    """Makes the function that makes numpy arrays of a source's batch, with the rows first."""
    if is_first(batch_axis):
        return to_numpy

    def take(batch: PyTree) -> PyTree:
        batch = to_numpy(batch)
        return rows_first(batch, axes_of_leaves((batch,), batch_axis))

    return take


def on_host(options: FeedOptions) -> FeedOptions:
    """Has a feed's batches stay on the host, with their rows where the source has them."""
    if is_first(options.batch_axis):
        return options

    def turn(batch: PyTree) -> PyTree:
        return turn_back(batch, options.batch_axis, lead=int(options.steps_per_call > 1))[0]

    return dataclasses.replace(options, place=turn, place_spec=turn)
