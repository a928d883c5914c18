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

from jdist.errors import DeviceError
from jdist.strategy import Strategy

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Spread:
    """An array of the state, spread over the memory of the replicas' hosts; it stands in the state in the array's place.

    Computing with it outside of a step takes `strategy.fetch(x)`, or `np.asarray(x)`; a step gets the array itself.

    Attributes:
        flat: the elements in row-major order, filled up to a multiple of the number of replicas.
        shape: the array's shape.
    """

    flat: jax.Array
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> Any:
        return self.flat.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.array(self.flat)[: self.size].reshape(self.shape)  # a copy, whatever `copy` asks for
        return whole if dtype is None else whole.astype(dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self)[index]

    def __repr__(self) -> str:
        # JAX rebuilds registered dataclasses with anything in place of their arrays.
        if not isinstance(self.flat, jax.Array):
            return f"Spread({self.flat!r}, shape={self.shape})"
        parts = self.flat.sharding.num_devices
        return (
            f"Spread({self.dtype}{list(self.shape)} in {parts} parts in host memory; strategy.fetch gives the array)"
        )


def is_spread(node: object) -> bool:
    """Whether `node` is a `Spread`, for use as `is_leaf`."""
    return isinstance(node, Spread)


@dataclass(frozen=True)
class Layout:
    """Where the parts of a strategy's arrays are.

    Attributes:
        num_parts: the number of replicas.
        host: sharding of a flat array in host memory, one part a replica.
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
        """The layout of a strategy with a mesh.

        Raises:
            DeviceError: the devices' hosts offer no memory that a program can address.
        """
        mesh, parts = strategy.mesh, PartitionSpec(strategy.axes)
        assert mesh is not None  # a strategy that spreads has one
        offered = [memory.kind for memory in strategy.devices[0].addressable_memories()]
        kinds = [kind for kind in ("pinned_host", "unpinned_host") if kind in offered]
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

    def flatten(self, x: jax.Array) -> jax.Array:
        """An array as a flat one that divides into the parts."""
        flat = x.reshape(-1)
        return jnp.pad(flat, (0, -flat.size % self.num_parts))

    def gather(self, flat: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The array of a flat one, both in the devices' memory and seen from outside of the replicas."""
        flat = jax.lax.with_sharding_constraint(flat, self.whole)
        return flat[: math.prod(shape)].reshape(shape)

    def real(self, flat: jax.Array, shape: tuple[int, ...], filling: Any) -> jax.Array:
        """A flat array with `filling` where it was filled up."""
        size = math.prod(shape)
        return flat if size == flat.size else jnp.where(jnp.arange(flat.size) < size, flat, filling)

    def struct(self, x: Any) -> Any:
        """The `ShapeDtypeStruct` of a leaf as it is kept; `x` is an array, a struct or a Spread of one."""
        shape, dtype = (x.shape, x.dtype) if is_spread(x) else (jnp.shape(x), jax.dtypes.canonicalize_dtype(x.dtype))
        if not self.is_spread(shape, dtype):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self.whole)
        padded = math.prod(shape) + -math.prod(shape) % self.num_parts
        return Spread(jax.ShapeDtypeStruct((padded,), dtype, sharding=self.host), shape)


def map_leaves(change: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """As `jax.tree.map`, with each `Spread` as one leaf."""
    return jax.tree.map(change, tree, *rest, is_leaf=is_spread)
