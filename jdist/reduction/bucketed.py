"""All-reduce in packs, so that the first gradients are on their way while later ones are still computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist.errors import StrategyError
from jdist.reduction.algorithm import Reduction, keeping_nothing
from jdist.support import checks
from jdist.typing import PyTree


def bucketed(bytes_per_pack: int) -> Reduction:
    """Sums by one `lax.psum` for each pack of leaves, in place of one for all.

    XLA combines all-reduces that do not depend on each other into one, whatever the program says. So each pack
    is made to wait for the one before it: to one element of each leaf it adds a zero that is computed from the sums of
    that pack. Programs compiled for CPU and TPU then hold exactly one all-reduce a pack (as long as a pack is smaller than
    what the backend combines at most).

    Args:
        bytes_per_pack: a pack is closed once it holds this many bytes or more; 0: one pack.

    Raises:
        StrategyError: `bytes_per_pack` is not an integer of at least 0.

    Example:
        >>> import jdist
        >>> jdist.reduction.bucketed(bytes_per_pack=4_000_000).name
        'bucketed(4000000)'
    """
    size = checks.whole_number("bytes_per_pack", bytes_per_pack, StrategyError, least=0, unit="bytes", call="bucketed")

    def total(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
        leaves, treedef = jax.tree.flatten(tree)
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        zero = None
        for pack in packs([leaf.nbytes for leaf in leaves], size):
            waiting = [leaves[i] if zero is None else _plus(leaves[i], zero) for i in pack]
            sums = jax.lax.psum(waiting, axes)
            for i, leaf in zip(pack, sums, strict=True):
                leaves[i] = leaf
            zero = _zero_after(sums) if any(leaf.size for leaf in sums) else zero
        return jax.tree.unflatten(treedef, leaves)

    return keeping_nothing(f"bucketed({bytes_per_pack})", total)


def packs(sizes: Sequence[int], bytes_per_pack: int) -> list[list[int]]:
    """Groups the places of leaves, by their bytes, into packs of `bytes_per_pack`."""
    if bytes_per_pack == 0:
        return [list(range(len(sizes)))] if sizes else []
    groups: list[list[int]] = []
    room = 0
    for i, size in enumerate(sizes):
        if room <= 0:
            groups.append([])
            room = bytes_per_pack
        groups[-1].append(i)
        room -= size
    return groups


def _zero_after(sums: list[jax.Array]) -> jax.Array:
    """Computes a zero, float32 scalar, that no compiler can tell from its inputs: x * 0 is NaN for an infinite x."""
    first = sum(jnp.real(leaf.ravel()[0]).astype(jnp.float32) for leaf in sums if leaf.size)
    return jnp.where(jnp.isfinite(first), first * 0, 0)


def _plus(leaf: jax.Array, zero: jax.Array) -> jax.Array:
    """Adds `zero` to the first element of a leaf."""
    if not leaf.size:
        return leaf
    flat = leaf.astype(jnp.int32).ravel() if leaf.dtype == jnp.bool_ else leaf.ravel()
    first = flat[:1] + zero.astype(flat.dtype)
    return jax.lax.dynamic_update_slice(flat, first, (0,)).reshape(leaf.shape)


def by_vectors(reduce: Callable[[jax.Array], jax.Array], tree: PyTree) -> PyTree:
    """Applies a function of vectors to all leaves of one dtype at a time, laid end to end."""
    # A bool counts as int32, as in `lax.psum`. Shapes stay.
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
    """Lays arrays of one dtype end to end."""
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
    """Pads a vector with zeros to a multiple of a number of elements."""
    return jnp.pad(vector, (0, -vector.size % multiple))
