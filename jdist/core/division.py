"""Which leaves of a state are in parts."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from jdist.core.sharded_leaf import Layout, ShardedLeaf, is_spread
from jdist.errors import StepError
from jdist.support.tracebacks import callers_level

PyTree = Any
Strategy = Any  # `jdist.core.strategy.Strategy`, which imports this file
_SMALL_STATE = 1 << 20  # bytes; a state of less fits anywhere, in parts or not
_OPTIMIZER = re.compile(r"opt(im(i[sz]er)?)?(_?states?)?")


def divided(strategy: Strategy, state: PyTree) -> list[bool]:
    """Decides for each leaf of a state whether it is in parts.

    Args:
        strategy: one that keeps states in parts.
        state: of arrays, their shapes or `ShardedLeaf`s.

    Raises:
        StepError: too much of the state would stay whole; it names the leaves and the option that allows it.
    """
    parts, layout = strategy.parts, Layout.of(strategy)
    assert parts is not None
    leaves = jax.tree.leaves_with_path(state, is_leaf=is_spread)
    described = [_described(x) for _, x in leaves]
    chosen = [layout.is_spread(*each) for each in described]
    sizes = [_num_bytes(*each) for each in described]
    if parts.of == "optimizer":
        is_of_optimizer, is_found = _of_optimizer(state)
        if not is_found and sum(sizes) >= _SMALL_STATE:
            named = ", ".join(jax.tree_util.keystr(path) for path, _ in leaves[:5])
            warnings.warn(
                f'shard="optimizer" keeps the optimiser\'s state in parts, and this state of {sum(sizes):,} bytes '
                f"({named}, ...) has none that can be told apart: neither a state of optax nor a field or key called opt_state "
                'or optimizer. All of it is whole on every device. Rename the field, or take shard="state".',
                stacklevel=callers_level(),
            )
        return [a and b for a, b in zip(chosen, is_of_optimizer, strict=True)]
    left = [(size, path) for size, in_parts, (path, _) in zip(sizes, chosen, leaves, strict=True) if not in_parts]
    share = sum(size for size, _ in left) / max(1, sum(sizes))
    if share > parts.most_whole and sum(sizes) >= _SMALL_STATE and layout.num_parts > 1:
        left.sort(key=lambda entry: -entry[0])
        named = ", ".join(f"{jax.tree_util.keystr(path)} ({size:,} bytes)" for size, path in left[:5])
        raise StepError(
            f"{share:.1%} of the state's {sum(sizes):,} bytes would stay whole on every device: {named}"
            f"{f' and {len(left) - 5} more' if len(left) > 5 else ''}. Arrays of fewer than {layout.whole_below:,} elements "
            f"stay whole, and PRNG keys. Lower `whole_below`, or allow it: `most_whole={math.ceil(share * 100) / 100}`."
        )
    return chosen


def _described(x: Any) -> tuple[tuple[int, ...], Any]:
    x = x if hasattr(x, "dtype") else jax.typeof(jnp.asarray(x))
    return x.shape, x.dtype


def _num_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * getattr(dtype, "itemsize", 4)


def _of_optimizer(state: PyTree) -> tuple[list[bool], bool]:
    """Finds the leaves in a state of optax, or in a field or under a key that is called like an optimiser.

    Returns:
        Of each leaf whether it is one; and whether there is such a state at all, which may have no leaves.
    """

    def is_optax(node: Any) -> bool:
        return isinstance(node, tuple) and type(node).__module__.split(".")[0] == "optax"

    flags, is_found = list[bool](), False
    for path, node in jax.tree.leaves_with_path(state, is_leaf=lambda x: is_spread(x) or is_optax(x)):
        names = [str(getattr(key, "name", getattr(key, "key", ""))) for key in path]
        inside = is_optax(node) or any(map(_OPTIMIZER.fullmatch, names))
        is_found |= inside
        flags += [inside] * len(jax.tree.leaves(node, is_leaf=is_spread))
    return flags, is_found


def shapes(strategy: Strategy, state: PyTree) -> PyTree:
    """Describes a state, of arrays or structs, as it is laid out."""
    layout = Layout.of(strategy)
    leaves, treedef = jax.tree.flatten(state, is_leaf=is_spread)
    structs = [layout.struct(x, in_parts) for x, in_parts in zip(leaves, divided(strategy, state), strict=True)]
    return jax.tree.unflatten(treedef, structs)


def is_in_place(layout: Layout, x: Any) -> bool:
    """Whether a leaf is in parts as this layout has them."""
    return isinstance(x, ShardedLeaf) and x.stored.sharding == layout.kept(x.shape)
