"""Arrays of the state in parts, one with each replica: in the devices' memory, or in that of their hosts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist.errors import DeviceError
from jdist.support import gloo
from jdist.support.arrays import put, to_host

PyTree = Any
Strategy = Any  # `jdist.core.strategy.Strategy`, which imports this file

_TILE_ROWS, _TILE_COLUMNS = 8, 128  # of a TPU, in elements; an array of two dimensions takes whole tiles
# Of an array stored in rows, the empty rest of its last tiles included: host memory is plenty, device memory is not.
_MOST_FILLING = {"host": 1 / 32, "device": 1 / 64}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class ShardedLeaf:
    """An array of the state of which each replica has a part; it stands in the state in the array's place.

    Computing with it outside of a step takes `strategy.fetch(x)`, or `np.asarray(x)`; a step gets the array itself.

    Attributes:
        stored: the array, filled up along the axis that is cut; or its elements in row-major order, [rows, columns] or
            [elements], filled up on the first axis.
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
        return gone + self._parts()

    def _parts(self) -> str:
        sharding = self.stored.sharding
        memory = "host" if sharding.memory_kind in _HOST_MEMORIES else "device"
        return f"{num_parts_of(sharding)} parts in {memory} memory"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if isinstance(self.stored, jax.Array) and not self.stored.is_fully_addressable:
            raise DeviceError(
                f"a {self.dtype} array of shape {self.shape} is in parts on the devices of several processes: a process alone "
                "cannot read it. Call `strategy.fetch(x)` on all of them, which gathers it."
            )
        whole = restored(np.array(self.stored), self.shape)  # a copy, whatever `copy` asks for
        return whole if dtype is None else whole.astype(dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self)[index]

    def __repr__(self) -> str:
        # JAX rebuilds registered dataclasses with anything in place of their arrays.
        if not isinstance(self.stored, jax.Array):
            return f"ShardedLeaf({self.stored!r}, shape={self.shape})"
        return f"ShardedLeaf({self.dtype}{list(self.shape)} in {self._parts()}; strategy.fetch gives the array)"


_HOST_MEMORIES = ("pinned_host", "unpinned_host")


def is_spread(node: object) -> bool:
    """Whether `node` is a `ShardedLeaf`, for use as `is_leaf`."""
    return isinstance(node, ShardedLeaf)


def whole_on_host(x: Any) -> Any:
    """Copies an array, in parts or not, to the host whole; `to_host` of the whole array."""
    return restored(to_host(x.stored), x.shape) if is_spread(x) else to_host(x)


def num_parts_of(sharding: Any) -> int:
    """Counts the parts into which a sharding cuts an array."""
    names = [name for entry in sharding.spec for name in ((entry,) if isinstance(entry, str) else entry or ())]
    return math.prod(sharding.mesh.shape[name] for name in names)


@dataclass(frozen=True)
class Form:
    """How an array is stored: reshaped, then filled up along the axis that is cut.

    Attributes:
        of: the array's shape.
        shape: what it is reshaped to: its own shape, rows that span its last axes, or one row of elements.
        axis: the axis of `shape` that is cut.
        size: the length of that axis, filling included: a multiple of the number of parts.
    """

    of: tuple[int, ...]
    shape: tuple[int, ...]
    axis: int
    size: int

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of the stored array."""
        return (*self.shape[: self.axis], self.size, *self.shape[self.axis + 1 :])

    @property
    def of_layer(self) -> Form | None:
        """How one layer of a stack is stored, whose first axis counts layers; None where layers are not stored one by one."""
        if self.shape != self.of or self.axis == 0:
            return None
        return Form(self.of[1:], self.shape[1:], self.axis - 1, self.size)

    def store(self, x: jax.Array) -> jax.Array:
        """Brings the array into its stored shape."""
        return jnp.pad(x.reshape(self.shape), [(0, a - b) for a, b in zip(self.stored, self.shape, strict=True)])

    def restore(self, stored: jax.Array) -> jax.Array:
        """Undoes `store`."""
        return stored[tuple(map(slice, self.shape))].reshape(self.of)


@dataclass(frozen=True)
class Layout:
    """Where the parts of a strategy's arrays are.

    Attributes:
        mesh: the strategy's.
        axes: the mesh axes over which parts are spread.
        num_parts: the number of parts of an array.
        memory: where the state is between steps.
        memory_kind: that memory's name in JAX; None: the devices' own.
        whole_below: arrays of fewer elements are kept whole.
        platform: the devices', "cpu", "gpu" or "tpu".
    """

    mesh: Mesh
    axes: tuple[str, ...]
    num_parts: int
    memory: Literal["host", "device"]
    memory_kind: str | None
    whole_below: int
    platform: str

    @classmethod
    def of(cls, strategy: Strategy) -> Layout:
        """Makes the layout of a strategy that keeps states in parts; raises DeviceError where hosts have no memory for it."""
        mesh, parts = strategy.mesh, strategy.parts
        assert mesh is not None  # a strategy that spreads has one
        assert parts is not None
        return cls(
            mesh=mesh,
            axes=parts.axes,
            num_parts=math.prod(mesh.shape[axis] for axis in parts.axes),
            memory=parts.memory,
            memory_kind=_host_memory(strategy) if parts.memory == "host" else None,
            whole_below=parts.whole_below,
            platform=strategy.devices[0].platform,
        )

    @property
    def on_host(self) -> bool:
        """Whether the state is in host memory between steps."""
        return self.memory == "host"

    @property
    def whole(self) -> NamedSharding:
        """The sharding of what every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def whole_on_host(self) -> NamedSharding:
        """The same in host memory."""
        return NamedSharding(self.mesh, PartitionSpec(), memory_kind=self.memory_kind)

    def spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """How the stored array of an array of this shape is cut."""
        return PartitionSpec(*(None,) * self.form(shape).axis, self.axes)

    def device(self, shape: tuple[int, ...]) -> NamedSharding:
        """The sharding of the stored array in the devices' memory."""
        return NamedSharding(self.mesh, self.spec(shape))

    def kept(self, shape: tuple[int, ...]) -> NamedSharding:
        """The sharding of the stored array where it is between steps."""
        return NamedSharding(self.mesh, self.spec(shape), memory_kind=self.memory_kind)

    def is_spread(self, shape: tuple[int, ...], dtype: Any) -> bool:
        """Whether an array is kept in parts: it has an element for each of them, and is no array of PRNG keys."""
        is_large = math.prod(shape) >= max(self.num_parts, self.whole_below)
        return self.num_parts > 1 and is_large and not jnp.issubdtype(dtype, jax.dtypes.prng_key)

    def form(self, shape: tuple[int, ...]) -> Form:
        """Chooses how to store an array so that little of it is filling.

        On devices one axis of the array is cut, of a stack of layers another than the first: a layer can then be gathered by
        itself. In host memory rows are cut that span the last axes. Any array could be one row of elements. But on a TPU,
        making a row of a matrix whose sides are no multiples of its tiles takes long, to compile as well, while rows that
        fill their tiles stay where they are.
        """
        n, size = self.num_parts, math.prod(shape)
        if self.memory == "host":
            rows = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(len(shape) - 1, 0, -1)]
            forms = [Form(shape, each, 0, _up(each[0], n)) for each in rows]
        else:
            # Parts along an early axis lie one behind the other where they are gathered.
            axes = [*range(1, len(shape)), 0] if len(shape) > 2 else range(len(shape))
            forms = [Form(shape, shape, axis, _up(shape[axis], n)) for axis in axes]
        most = (1 + _MOST_FILLING[self.memory]) * size
        in_a_row = Form(shape, (size,), 0, _up(size, n))
        return next((form for form in forms if n * self._size_of_part(form) <= most), in_a_row)

    def _size_of_part(self, form: Form) -> int:
        """Counts the elements that a part takes on a device."""
        part = [*form.shape[: form.axis], form.size // self.num_parts, *form.shape[form.axis + 1 :]]
        if (self.on_host or self.platform == "tpu") and len(part) > 1:
            part[-2:] = _up(part[-2], _TILE_ROWS), _up(part[-1], _TILE_COLUMNS)
        return math.prod(part)

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the stored array of an array of this shape."""
        return self.form(shape).stored

    def part_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a part of an array of this shape."""
        form = self.form(shape)
        return (*form.shape[: form.axis], form.size // self.num_parts, *form.shape[form.axis + 1 :])

    def store(self, x: jax.Array) -> jax.Array:
        """Brings an array into its stored shape."""
        return self.form(x.shape).store(x)

    def restore(self, stored: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Undoes `store`."""
        return self.form(shape).restore(stored)

    def own_part(self, x: jax.Array) -> jax.Array:
        """Takes this replica's part of an array that all hold; called where the axes are bound."""
        form = self.form(x.shape)
        length = form.size // self.num_parts
        return jax.lax.dynamic_slice_in_dim(form.store(x), jax.lax.axis_index(self.axes) * length, length, form.axis)

    def all_gather(self, part: jax.Array, form: Form) -> jax.Array:
        """Gathers the array of which each replica has a part; called where the axes are bound."""
        return form.restore(jax.lax.all_gather(part, self.axes, axis=form.axis, tiled=True))

    def sum_scatter(self, x: jax.Array, form: Form) -> jax.Array:
        """Sums arrays over the replicas among which parts are spread; each receives its part. The transpose of `all_gather`."""
        if gloo.scatters_wrongly():
            return self.sum_scatter_wide(x, form, x.dtype)
        return jax.lax.psum_scatter(form.store(x), self.axes, scatter_dimension=form.axis, tiled=True)

    def sum_scatter_wide(self, x: jax.Array, form: Form, dtype: Any) -> jax.Array:
        """Sums as `sum_scatter`, in a wider dtype than the arrays have.

        Where any device reaches any other directly, the parts are exchanged as they are and added up by their receivers: half
        the bytes, and no wide copy of the array. In a torus that would take several times the hops of a sum on the way.
        """
        if self.platform == "tpu":
            return self.sum_scatter(x.astype(dtype), form)
        x = form.store(x)
        parts = x.reshape(*x.shape[: form.axis], self.num_parts, -1, *x.shape[form.axis + 1 :])
        received = jax.lax.all_to_all(jnp.moveaxis(parts, form.axis, 0), self.axes, 0, 0, tiled=True)
        return received.sum(0, dtype=dtype)

    def gather(self, stored: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Gathers the array of a stored one, both in the devices' memory and seen from outside of the replicas."""
        # In parts first: else the compiler may gather what it is computed from instead.
        parts = jax.lax.with_sharding_constraint(stored, self.device(shape))
        return self.restore(jax.lax.with_sharding_constraint(parts, self.whole), shape)

    def real(self, stored: jax.Array, shape: tuple[int, ...], filling: Any) -> jax.Array:
        """Writes `filling` into what was filled up of a stored array."""
        form = self.form(shape)
        if form.stored == form.shape:
            return stored
        places = jax.lax.broadcasted_iota(jnp.int32, stored.shape, form.axis)
        return jnp.where(places < form.shape[form.axis], stored, filling)

    def struct(self, x: Any, in_parts: bool) -> Any:
        """The `ShapeDtypeStruct` of a leaf as it is kept; `x` is an array, a struct or a `ShardedLeaf` of one."""
        aval = x if isinstance(x, ShardedLeaf | jax.ShapeDtypeStruct) else jax.typeof(x)
        shape, dtype = aval.shape, aval.dtype
        if not in_parts:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self.whole)
        return ShardedLeaf(jax.ShapeDtypeStruct(self.stored_shape(shape), dtype, sharding=self.kept(shape)), shape)


def _up(length: int, multiple: int) -> int:
    return length + -length % multiple


def _host_memory(strategy: Strategy) -> str:
    """Finds the name of the memory of the devices' hosts; raises DeviceError where they offer none to programs."""
    offered = [memory.kind for memory in strategy.devices[0].addressable_memories()]
    kinds = [kind for kind in _HOST_MEMORIES if kind in offered]
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
    return kinds[0]


def restored(stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Restores the array of a stored one, on the host."""
    if stored.ndim == len(shape):
        return stored[tuple(map(slice, shape))]
    return stored.reshape(-1)[: math.prod(shape)].reshape(shape)


def spread_like(array: np.ndarray, like: ShardedLeaf) -> ShardedLeaf:
    """Spreads an array on the host as another of its shape is."""
    stored = np.zeros(like.stored.shape, array.dtype)
    if stored.ndim == array.ndim:
        stored[tuple(map(slice, array.shape))] = array
    else:
        stored.reshape(-1)[: array.size] = array.reshape(-1)
    return ShardedLeaf(put(stored, like.stored.sharding), like.shape)


def map_leaves(change: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Maps leaves as `jax.tree.map`, with each `ShardedLeaf` as one leaf."""
    return jax.tree.map(change, tree, *rest, is_leaf=is_spread)
