"""Values that differ from replica to replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jdist.core.replica_mesh import ReplicaMesh
from jdist.errors import StepError
from jdist.support.arrays import check_not_donated, is_key, local_rows, put_rows, to_host
from jdist.support.checks import as_int
from jdist.typing import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Uneven:
    """Values of different sizes, on the host: each replica's tree is kept by itself."""

    parts: tuple[PyTree, ...]  # one pytree of numpy arrays a replica, all of one structure


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerReplica:
    """A value that each replica holds its own version of.

    Inside a step, `PerReplica(x)` wraps this replica's `x` and keeps it from being averaged. Outside, the
    same wrapper holds the versions of all replicas, stacked along a new leading axis. Versions of different sizes, which
    `PerReplica.of` allows, stay on the host: `strategy.gather`, `strategy.reduce` and `local_results` take them, compiled
    code (`strategy.run`, a step) does not.

    Attributes:
        value: a pytree; inside a step this replica's arrays, outside arrays of shape [num_replicas, ...], or `Uneven`.

    Example:
        >>> import jdist, jax.numpy as jnp
        >>> strategy = jdist.one_device()
        >>> [float(x) for x in strategy.run(lambda: jnp.float32(jdist.replica_id())).local_results()]
        [0.0]
    """

    value: PyTree

    @classmethod
    def of(cls, values: Sequence[PyTree]) -> PerReplica:
        """Puts each replica's value together on the host.

        Args:
            values: one pytree of arrays or numbers a replica, in the order of the replicas; sizes may differ.

        Returns:
            The values stacked along a new leading axis; or kept apart, where their shapes differ.

        Raises:
            StepError: no value, trees of different structure, or a leaf that is not an array of numbers.

        Example:
            >>> import jdist, numpy as np
            >>> jdist.PerReplica.of([np.arange(2), np.arange(2)]).value.shape
            (2, 2)
            >>> [len(x) for x in jdist.PerReplica.of([np.arange(4), np.arange(2)]).local_results()]
            [4, 2]
        """
        values = tuple(values)
        if not values:
            raise StepError("jdist.PerReplica.of: no values; pass one for each replica.")
        for i, value in enumerate(values):
            if jax.tree.structure(value) != jax.tree.structure(values[0]):
                raise StepError(
                    f"jdist.PerReplica.of: the value of replica {i} has the tree {jax.tree.structure(value)}, that of "
                    f"replica 0 has {jax.tree.structure(values[0])}. Replicas may differ in sizes, not in structure."
                )
        check_not_donated(values, "a value of a replica")
        parts = tuple(jax.tree_util.tree_map_with_path(_as_array, value) for value in values)
        shapes = [[leaf.shape for leaf in jax.tree.leaves(part)] for part in parts]
        if any(shape != shapes[0] for shape in shapes):
            return cls(Uneven(parts))
        return cls(jax.tree.map(_stacked, *parts))

    def __getitem__(self, key: Any) -> PerReplica:
        """Takes the entry `key` of the tree: of a function that returns `(a, b)`, `x[0]` is the `PerReplica` of `a`."""
        if isinstance(self.value, Uneven):
            return PerReplica(Uneven(tuple(_entries(part)[key] for part in self.value.parts)))
        return PerReplica(_entries(self.value)[key])

    def __iter__(self) -> Iterator[Any]:
        """Iterates as the tree does: `a, b = strategy.run(...)`; over the keys of a dict."""
        tree = _entries(self.value.parts[0] if isinstance(self.value, Uneven) else self.value)
        return iter(tree) if isinstance(tree, Mapping) else (self[i] for i in range(len(tree)))

    def local_results(self) -> tuple[PyTree, ...]:
        """Lists the version of each replica of this process, on the host, in the order of the replicas.

        Returns:
            A tuple of pytrees of numpy arrays, `num_replicas` of them with one process.
        """
        return self._versions(local_rows)

    def all_results(self) -> tuple[PyTree, ...]:
        """Lists every replica's version, on the host; with several processes, all of them have to call.

        Returns:
            A tuple of `num_replicas` pytrees of numpy arrays.
        """
        return self._versions(to_host)

    def _versions(self, read: Callable[[Any], Any]) -> tuple[PyTree, ...]:
        check_not_donated(self.value, "the value")
        stacked = jax.tree.map(read, self.value)
        if isinstance(stacked, Uneven):
            return stacked.parts
        leaves = jax.tree.leaves(stacked)
        sizes = {leaf.shape[:1] for leaf in leaves}
        if () in sizes or len(sizes) > 1:
            raise StepError(
                "a PerReplica holds arrays with one leading axis of replicas, it has the shapes "
                f"{', '.join(str(leaf.shape) for leaf in leaves)}; write `jdist.PerReplica.of([first, second, ...])`."
            )
        num_replicas = leaves[0].shape[0] if leaves else 0
        return tuple(jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(num_replicas))


def _as_array(path: Any, x: Any) -> Any:
    """Converts a leaf on the host to the dtype that JAX gives it; a typed PRNG key stays."""
    if is_key(x):
        return x
    array = np.asarray(x)
    if array.dtype.kind in "OSUMm":
        raise StepError(
            f"a value of a replica is not an array of numbers: {jax.tree_util.keystr(path) or 'it'} is a {type(x).__name__}. "
            "Keep other things in a list of your own, one entry for each replica."
        )
    return array.astype(jnp.result_type(array))


def _stacked(*arrays: Any) -> Any:
    if is_key(arrays[0]):
        return jnp.stack(arrays)
    return np.stack(arrays).astype(jnp.result_type(*arrays))


def _entries(tree: PyTree) -> Any:
    if not isinstance(tree, Mapping | tuple | list):
        raise TypeError(
            f"this `PerReplica` holds one {type(tree).__name__}, a version for each replica, and has no entries. "
            "`x.local_results()` lists the versions of this process's replicas."
        )
    return tree


def is_rows_of_replicas(x: Any, by_replica: Any, call: str) -> bool:
    """Returns whether `x` is an array of a distributed batch; refuses a stack of batches."""
    # `by_replica` is the sharding of such an array, None without a mesh; errors name `call`.
    # Replicas of a stack lie along its second axis.
    if by_replica is None or not isinstance(x, jax.Array):
        return False
    of_stack = NamedSharding(by_replica.mesh, PartitionSpec(None, *by_replica.spec))
    if x.sharding == of_stack and of_stack.num_devices > 1:
        raise StepError(
            f"{call}: an array of shape {x.shape} is a stack of {x.shape[0]} batches, as `distribute_dataset(..., "
            "steps_per_call=...)` makes them. Take one batch of it: `jax.tree.map(lambda x: x[0], batches)`."
        )
    return x.sharding == by_replica


def is_per_replica(node: object) -> bool:
    """Returns whether `node` is a `PerReplica`, for use as `is_leaf`."""
    return isinstance(node, PerReplica)


def take_per_replica(tree: PyTree) -> tuple[PyTree, list[PyTree]]:
    """Takes the PerReplica values out of a tree, in order; `put_per_replica` undoes it."""
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


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """Names the replica that a value is made for: the argument of `strategy.distribute_values_from_function`'s function.

    Attributes:
        replica_id_in_sync_group: the replica's number, from 0.
        num_replicas_in_sync: how many replicas there are.
    """

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


def values_from_function(fn: Callable[[ValueContext], PyTree], mesh: ReplicaMesh) -> PerReplica:
    """Makes the values of this process's replicas: `Strategy.distribute_values_from_function`."""
    if not callable(fn):
        raise StepError(
            "strategy.distribute_values_from_function needs a function from a `jdist.ValueContext` to a replica's value, "
            f"it got a {type(fn).__name__}."
        )
    values = PerReplica.of([fn(ValueContext(i, mesh.num_replicas)) for i in mesh.local_replicas])
    sharding = mesh.batch_sharding
    if isinstance(values.value, Uneven) or sharding is None:
        return values
    return PerReplica(jax.tree.map(lambda x: put_rows(x, sharding, mesh.num_replicas, 0), values.value))


def as_array(call: str, name: str, x: Any) -> jax.Array:
    """Makes an argument an array of numbers, or of keys; or raises StepError with the call's name."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as exc:  # text, None, lists of unequal lengths
        raise StepError(
            f"{call}: {name} is {x!r:.60}, a {type(x).__name__}; it must be an array of numbers, or a number. Keep other "
            "things out of what replicas exchange."
        ) from exc


def as_arrays(call: str, tree: PyTree) -> PyTree:
    """Makes each leaf of a tree an array of numbers, or of keys, or raises StepError."""
    return jax.tree_util.tree_map_with_path(lambda path, x: as_array(call, named(path), x), tree)


def check_numbers(call: str, op: str, tree: PyTree) -> None:
    """Raises StepError for PRNG keys, which cannot be reduced, and for complex numbers, which have no order."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if is_key(x):
            raise StepError(
                f"{call}: {named(path)} is {x.dtype}{list(x.shape)}, PRNG keys, which have no {op}. Make the same key on "
                'every replica, or take that of the first: `jdist.aggregate(key, "first")`.'
            )
        if op in ("max", "min") and jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise StepError(
                f"{call}: {named(path)} is {x.dtype}{list(x.shape)}; complex numbers have no order and so no {op}. Take that "
                "of `abs(x)`, or of `x.real` and `x.imag`."
            )


def as_axis(call: str, axis: Any) -> int:
    """Converts an axis to concatenate along to a Python int, or raises StepError."""
    number = as_int(axis)
    if number is not None:
        return number
    raise StepError(f"{call}: `axis` is {axis!r}; it must be an int, the axis to concatenate along.")


def named(path: Any) -> str:
    """Names a leaf in an error, by its path."""
    return f"leaf {jax.tree_util.keystr(path)}" if path else "the value"


def floating(x: jax.Array) -> jax.Array:
    """Converts to floating point, as a mean of integers is: their sum might not fit their own dtype."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.result_type(x, float))


def countable(x: jax.Array) -> jax.Array:
    """Converts bools to int32, so that a sum counts them."""
    return x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
