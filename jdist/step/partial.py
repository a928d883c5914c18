"""Arguments kept apart from the state whose buffers the same call donates."""

from __future__ import annotations

import weakref
from typing import Any

import jax
import jax.numpy as jnp

from jdist.core.host_sharded import is_spread, map_leaves
from jdist.support.arrays import is_key

PyTree = Any


class Apart:
    """Copies what of a call's arguments shares a buffer with the call's state.

    JAX refuses such a call on one device, and ends the process on several. An array that shares no buffer with a state
    shares none with the states that come of it, so each is looked at once for as long as it is passed in.
    """

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[jax.Array]] = {}

    def forget(self) -> None:
        """Looks at every array again: the state does not come from the one before."""
        self._known.clear()

    def of(self, tree: PyTree, state: PyTree) -> PyTree:
        """The tree with a copy of each array that shares a buffer with `state`.

        Args:
            tree: arguments of a call.
            state: the state of the same call.
        """
        arrays = [x for x in jax.tree.leaves(tree, is_leaf=is_spread) if isinstance(x, jax.Array)]
        new = [x for x in arrays if (known := self._known.get(id(x))) is None or known() is not x]
        if not new:
            return tree
        own = [x for x in jax.tree.leaves(state, is_leaf=is_spread) if isinstance(x, jax.Array)]
        shared = {id(x) for x in new if any(_share(x, leaf) for leaf in own)}
        self._known = {id(x): weakref.ref(x) for x in arrays if id(x) not in shared}
        return map_leaves(lambda x: jnp.copy(x) if id(x) in shared else x, tree) if shared else tree


def _share(a: jax.Array, b: jax.Array) -> bool:
    """Whether two arrays have a buffer in common: they are one, or one was made of the other by `jax.device_put`."""
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        if is_key(a) == is_key(b):
            return False
        a, b = (jax.random.key_data(x) if is_key(x) else x for x in (a, b))  # these are the key's own buffers
        return _share(a, b)
    if is_key(a):
        return _share(jax.random.key_data(a), jax.random.key_data(b))
    if not a.size:
        return False
    (device,) = a.addressable_data(0).devices()
    there = [shard.data for shard in b.addressable_shards if shard.device == device]
    return first_buffer(a) in map(first_buffer, there)


def first_buffer(x: jax.Array) -> int:
    """What tells an array's buffer on the first of its devices from all others: its address; of no elements, its own id."""
    data = jax.random.key_data(x) if is_key(x) else x
    return data.addressable_data(0).unsafe_buffer_pointer() if data.size else id(x)
