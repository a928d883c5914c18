"""A tree as a few flat vectors, so that an algorithm of several collectives runs once and not once for each leaf."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def by_vectors(reduce: Callable[[jax.Array], jax.Array], tree: PyTree) -> PyTree:
    """Applies a function to all leaves of one dtype at a time, laid end to end.

    Args:
        reduce: `(vector [elements]) -> vector [elements]`.
        tree: pytree of arrays or numbers. A bool counts as int32, as in `lax.psum`.

    Returns:
        The tree of the results, shapes as they were.
    """
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    leaves = [leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf for leaf in leaves]
    places: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.size:
            places.setdefault(leaf.dtype, []).append(i)
    for which in places.values():
        reduced = split(reduce(concatenate([leaves[i] for i in which])), [leaves[i].shape for i in which])
        for i, leaf in zip(which, reduced, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)


def concatenate(leaves: list[jax.Array]) -> jax.Array:
    """Arrays of one dtype, laid end to end."""
    return leaves[0].ravel() if len(leaves) == 1 else jnp.concatenate([leaf.ravel() for leaf in leaves])


def split(vector: jax.Array, shapes: list[tuple[int, ...]]) -> list[jax.Array]:
    """Undoes `concatenate`."""
    arrays, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        arrays.append(jax.lax.slice(vector, (start,), (start + size,)).reshape(shape))
        start += size
    return arrays


def padded(vector: jax.Array, multiple: int) -> jax.Array:
    """The vector with zeros behind it, up to a multiple of a number of elements."""
    return jnp.pad(vector, (0, -vector.size % multiple))
