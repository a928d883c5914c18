"""Values that differ from replica to replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerReplica:
    """A value that each replica holds its own version of.

    Inside a step, `PerReplica(x)` wraps this replica's `x` and keeps it from being averaged. Outside, the
    same wrapper holds the versions of all replicas, stacked along a new leading axis.

    Attributes:
        value: a pytree; inside a step this replica's arrays, outside arrays of shape [num_replicas, ...].

    Example:
        >>> import jdist, jax.numpy as jnp
        >>> strategy = jdist.one_device()
        >>> strategy.run(lambda: jnp.float32(jdist.replica_id())).local_results()
        (array(0., dtype=float32),)
    """

    value: PyTree

    def local_results(self) -> tuple[PyTree, ...]:
        """Each replica's version, on the host, in the order of the replicas.

        Returns:
            A tuple of `num_replicas` pytrees of numpy arrays.
        """
        stacked = jax.tree.map(to_host, self.value)
        leaves = jax.tree.leaves(stacked)
        num_replicas = leaves[0].shape[0] if leaves else 0
        return tuple(jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(num_replicas))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithResiduals:
    """A step's state, and what its all-reduce still owes: what a compressed gradient left out is sent with the next one.

    A step under a strategy that compresses gradients returns its state so; the step itself sees only `state`. Pass it on
    whole, and save it whole. Attributes and items of `state` can be read as if they were its own.

    Attributes:
        state: the state as the step returned it.
        residuals: `{name of a step: one entry for each gradient that it takes}`; inside a step this replica's arrays,
            outside arrays of shape [num_replicas, ...] of which each replica holds its own part.
    """

    state: PyTree
    residuals: PyTree

    def __getattr__(self, name: str) -> Any:
        if name in ("state", "residuals") or name.startswith("__"):  # asked for while an object is being made
            raise AttributeError(name)
        return getattr(self.state, name)

    def __getitem__(self, key: Any) -> Any:
        return self.state[key]


def without_residuals(state: PyTree) -> PyTree:
    """The user's own state."""
    return state.state if isinstance(state, WithResiduals) else state


def map_residuals(fn: Callable[[jax.Array], Any], state: PyTree) -> PyTree:
    """The state with `fn` applied to the residuals' leaves, if it has any."""
    if not isinstance(state, WithResiduals):
        return state
    return WithResiduals(state.state, jax.tree.map(fn, state.residuals))


def to_host(x: Any) -> Any:
    """An array as a numpy array of its own; a typed PRNG key stays a key array."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(np.asarray(jax.random.key_data(x))), impl=jax.random.key_impl(x))
    return np.array(x)  # a copy: np.asarray could show a buffer that a later step overwrites


def is_per_replica(node: object) -> bool:
    """Whether `node` is a `PerReplica`, for use as `is_leaf`."""
    return isinstance(node, PerReplica)


def take_per_replica(tree: PyTree) -> tuple[PyTree, list[PyTree]]:
    """Separates what differs between replicas from what does not.

    Returns:
        `(tree with each PerReplica emptied, the values taken out in order)`; `put_per_replica` undoes it.
    """
    taken: list[PyTree] = []

    def take(node: PyTree) -> PyTree:
        if not isinstance(node, PerReplica):
            return node
        taken.append(node.value)
        return PerReplica(None)

    return jax.tree.map(take, tree, is_leaf=is_per_replica), taken


def put_per_replica(tree: PyTree, taken: list[PyTree]) -> PyTree:
    """Undoes `take_per_replica`."""
    values = iter(taken)
    return jax.tree.map(
        lambda node: PerReplica(next(values)) if isinstance(node, PerReplica) else node,
        tree,
        is_leaf=is_per_replica,
    )
