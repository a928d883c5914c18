"""Arrays of which every replica's host holds a part: one copy in all, in host memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jdist.core.strategy import Strategy
from jdist.errors import DeviceError

PyTree = Any

_TILE_ROWS, _TILE_COLUMNS = 8, 128  # of a TPU, in elements; an array of two dimensions takes whole tiles
_MOST_FILLING = 1 / 32  # of an array stored in rows, the empty rest of its last tiles included


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class HostSharded:
    """An array of the state, spread over the memory of the replicas' hosts; it stands in the state in the array's place.

    Computing with it outside of a step takes `strategy.fetch(x)`, or `np.asarray(x)`; a step gets the array itself.

    Attributes:
        stored: the elements in row-major order, [rows] or [rows, columns], filled up to a multiple of the number of
            replicas; each holds as many rows.
        shape: the array's shape.
    """

    stored: Any  # a jax.Array, or a ShapeDtypeStruct where only shapes are known
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> Any:
        return self.stored.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def whereabouts(self) -> str:
        """Where it lives, in words, for what notebooks show of a state."""
        if not isinstance(self.stored, jax.Array):
            return "only its shape is known"
        gone = "deleted (donated to a step): was " * self.stored.is_deleted()
        return f"{gone}{self.stored.sharding.num_devices} parts in host memory"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = restored(np.array(self.stored), self.shape)  # a copy, whatever `copy` asks for
        return whole if dtype is None else whole.astype(dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self)[index]

    def __repr__(self) -> str:
        # JAX rebuilds registered dataclasses with anything in place of their arrays.
        if not isinstance(self.stored, jax.Array):
            return f"HostSharded({self.stored!r}, shape={self.shape})"
        parts = self.stored.sharding.num_devices
        return f"HostSharded({self.dtype}{list(self.shape)} in {parts} parts in host memory; strategy.fetch gives the array)"


def is_spread(node: object) -> bool:
    """Whether `node` is a `HostSharded`, for use as `is_leaf`."""
    return isinstance(node, HostSharded)


@dataclass(frozen=True)
class Layout:
    """Where the parts of a strategy's arrays are.

    Attributes:
        num_parts: the number of replicas.
        host: sharding of a stored array in host memory, one part a replica.
        device: the same in the devices' memory.
        whole: sharding of what every device holds whole.
        whole_on_host: the same in host memory.
    """

    num_parts: int
    host: NamedSharding
    device: NamedSharding
    whole: NamedSharding
    whole_on_host: NamedSharding

    @classmethod
    def of(cls, strategy: Strategy) -> Layout:
        """Makes the layout of a strategy with a mesh; raises DeviceError where its hosts offer no memory to programs."""
        mesh, parts = strategy.mesh, PartitionSpec(strategy.axes)
        assert mesh is not None  # a strategy that spreads has one
        offered = [memory.kind for memory in strategy.devices[0].addressable_memories()]
        kinds = [kind for kind in ("pinned_host", "unpinned_host") if kind in offered]
        if not offered:
            raise DeviceError(
                f"central_storage keeps the state in host memory, and JAX describes {strategy.devices[0].device_kind} devices "
                "that are not here without any: compile for a TPU topology, or use jdist.mirrored(topology=...)."
            )
        if not kinds:
            raise DeviceError(
                f"central_storage keeps the state in host memory, which {strategy.devices[0]} does not offer; it has "
                f"{', '.join(offered)}. Use jdist.mirrored()."
            )
        return cls(
            num_parts=strategy.num_replicas,
            host=NamedSharding(mesh, parts, memory_kind=kinds[0]),
            device=NamedSharding(mesh, parts),
            whole=NamedSharding(mesh, PartitionSpec()),
            whole_on_host=NamedSharding(mesh, PartitionSpec(), memory_kind=kinds[0]),
        )

    def is_spread(self, shape: tuple[int, ...], dtype: Any) -> bool:
        """Whether an array is kept in parts: it has an element for each of them, and is no array of PRNG keys."""
        return math.prod(shape) >= self.num_parts > 1 and not jnp.issubdtype(dtype, jax.dtypes.prng_key)

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Chooses the shape to store an array in: [rows, columns] where that needs little filling, else [elements].

        Any array could be one row of elements. But on a TPU, making a row of a matrix whose sides are no multiples of
        its tiles takes long, to compile as well, while rows that fill their tiles stay where they are.
        """
        for axis in range(len(shape) - 1, 0, -1):
            rows, columns = math.prod(shape[:axis]), math.prod(shape[axis:])
            own = -(-rows // self.num_parts)
            own_in_tiles = (own + -own % _TILE_ROWS) * (columns + -columns % _TILE_COLUMNS)
            if self.num_parts * own_in_tiles <= (1 + _MOST_FILLING) * rows * columns:
                return (self.num_parts * own, columns)
        size = math.prod(shape)
        return (size + -size % self.num_parts,)

    def store(self, x: jax.Array) -> jax.Array:
        """Brings an array into its stored shape."""
        rows, *columns = self.stored_shape(x.shape)
        x = x.reshape(-1, *columns)
        return jnp.pad(x, [(0, rows - x.shape[0])] + [(0, 0)] * len(columns))

    def restore(self, stored: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Undoes `store`."""
        return stored[: self._rows(shape)].reshape(shape)

    def gather(self, stored: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Gathers the array of a stored one, both in the devices' memory and seen from outside of the replicas."""
        return self.restore(jax.lax.with_sharding_constraint(stored, self.whole), shape)

    def real(self, stored: jax.Array, shape: tuple[int, ...], filling: Any) -> jax.Array:
        """Writes `filling` into the rows of a stored array that were filled up."""
        rows = self._rows(shape)
        if rows == stored.shape[0]:
            return stored
        return jnp.where(jax.lax.broadcasted_iota(jnp.int32, stored.shape, 0) < rows, stored, filling)

    def _rows(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) // math.prod(self.stored_shape(shape)[1:])

    def struct(self, x: Any) -> Any:
        """The `ShapeDtypeStruct` of a leaf as it is kept; `x` is an array, a struct or a `HostSharded` of one."""
        aval = x if isinstance(x, HostSharded | jax.ShapeDtypeStruct) else jax.typeof(x)
        shape, dtype = aval.shape, aval.dtype
        if not self.is_spread(shape, dtype):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self.whole)
        return HostSharded(jax.ShapeDtypeStruct(self.stored_shape(shape), dtype, sharding=self.host), shape)


def restored(stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Restores the array of a stored one, on the host."""
    return stored.reshape(-1)[: math.prod(shape)].reshape(shape)


def spread_like(array: np.ndarray, like: HostSharded) -> HostSharded:
    """Spreads an array on the host as another of its shape is."""
    stored = np.zeros(like.stored.shape, array.dtype)
    stored.reshape(-1)[: array.size] = array.reshape(-1)
    return HostSharded(jax.device_put(stored, like.stored.sharding), like.shape)


def map_leaves(change: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Maps leaves as `jax.tree.map`, with each `HostSharded` as one leaf."""
    return jax.tree.map(change, tree, *rest, is_leaf=is_spread)
