"""The cuts of a state's arrays: into parts among the replicas, and each over the devices of a replica."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist.errors import DeviceError
from jdist.support import xla

Strategy = Any  # `jdist.core.strategy.Strategy`, which imports this file

_TILE_ROWS, _TILE_COLUMNS = 8, 128  # of a TPU, in elements; an array of two dimensions takes whole tiles
# Of an array stored in rows, the empty rest of its last tiles included: host memory is plenty, device memory is not.
_MOST_PADDING = {"host": 1 / 32, "device": 1 / 64}
# Of an array that may be a stack of layers: a layer gathered at a time is worth so much, if each device holds at most 2 % of
# the array more than its share.
_MOST_PADDING_OF_STACK, _MORE_A_DEVICE = 1 / 2, 0.02
HOST_MEMORIES = ("pinned_host", "unpinned_host")


def names_in(entry: Any) -> tuple[str, ...]:
    """Lists the mesh axes of one entry of a `PartitionSpec`, or of a rule."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def axes_of(spec: Iterable[Any]) -> tuple[str, ...]:
    """Lists the mesh axes over which a `PartitionSpec` divides an array."""
    return tuple(name for entry in spec for name in names_in(entry))


def over_replicas(
    strategy: Strategy, function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Makes of what each replica computes a function of whole arrays; inside a replica the compiler divides the work."""
    return jax.shard_map(
        function,
        mesh=strategy.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(strategy.axes),
        # With it averaged gradients come out num_replicas times too large, and flax's RNN fails to trace; jdist compares
        # the replicas itself (step/divergence.py).
        check_vma=False,
    )


@dataclass(frozen=True)
class Form:
    """The storage of an array: reshaped, then padded along the axis that is cut."""

    of: tuple[int, ...]  # the array's shape
    # reshaped: its own shape, rows that span its last axes, or one row of elements
    shape: tuple[int, ...]
    axis: int = 0  # the axis of `shape` that is cut among the replicas
    # the length of that axis with padding, a multiple of the number of parts; 0: each replica has
    # the full array
    size: int = 0
    # for each axis of the array, the mesh axes inside a replica that divide it, or None; it may end
    # early, and is empty for a reshaped array
    model: tuple[Any, ...] = ()

    @classmethod
    def whole(cls, shape: tuple[int, ...], model: tuple[Any, ...] = ()) -> Form:
        """Makes the form of an array that is not cut among the replicas."""
        return cls(shape, shape, model=model)

    @property
    def is_cut(self) -> bool:
        """Returns whether replicas have parts of the array."""
        return self.size > 0

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of the stored array."""
        return self._with_length(self.size) if self.is_cut else self.shape

    def _with_length(self, length: int) -> tuple[int, ...]:
        return (*self.shape[: self.axis], length, *self.shape[self.axis + 1 :])

    def part(self, num_parts: int) -> tuple[int, ...]:
        """Returns the shape of one of so many parts."""
        return self._with_length(self.size // num_parts) if self.is_cut else self.shape

    @property
    def of_layer(self) -> Form | None:
        """Returns the form of one layer of a stack (the first axis counts layers); None if not stored layer by layer."""
        if self.shape != self.of or self.axis == 0 or any(self.model[:1]):
            return None
        return Form(self.of[1:], self.shape[1:], self.axis - 1, self.size, self.model[1:])

    def store(self, x: Any) -> Any:
        """Brings an array, of JAX's or NumPy's, into its stored shape."""
        pad = np.pad if isinstance(x, np.ndarray) else jnp.pad
        return pad(x.reshape(self.shape), [(0, a - b) for a, b in zip(self.stored, self.shape, strict=True)])

    def restore(self, stored: jax.Array) -> jax.Array:
        """Undoes `store`."""
        return stored[tuple(map(slice, self.shape))].reshape(self.of)

    def with_padding(self, stored: jax.Array, padding: Any) -> jax.Array:
        """Writes another value into the padding of a stored array."""
        if self.stored == self.shape:
            return stored
        places = jax.lax.broadcasted_iota(jnp.int32, stored.shape, self.axis)
        return jnp.where(places < self.shape[self.axis], stored, padding)


@dataclass(frozen=True)
class Layout:
    """The places of the parts of a strategy's arrays."""

    mesh: Mesh
    axes: tuple[str, ...]  # the mesh axes over which parts are spread
    # the mesh axes of the replicas; a replica's own devices are spread over the others
    bound: tuple[str, ...]
    num_parts: int  # of an array
    memory: Literal["host", "device"]  # of the state between steps
    memory_kind: str | None  # JAX's name of it; None: the devices' own
    whole_below: int  # arrays of fewer elements are kept in full
    platform: str  # "cpu", "gpu" or "tpu"

    @classmethod
    def of(cls, strategy: Strategy) -> Layout:
        """Makes the layout of a strategy that keeps states in parts; raises DeviceError where hosts have no memory for it."""
        mesh, parts = strategy.mesh, strategy.parts
        assert mesh is not None  # a strategy that spreads has one
        assert parts is not None
        return cls(
            mesh=mesh,
            axes=parts.axes,
            bound=strategy.axes,
            num_parts=math.prod(mesh.shape[axis] for axis in parts.axes),
            memory=parts.memory,
            memory_kind=_host_memory(strategy) if parts.memory == "host" else None,
            whole_below=parts.whole_below,
            platform=strategy.devices[0].platform,
        )

    @property
    def on_host(self) -> bool:
        """Returns whether the state is in host memory between steps."""
        return self.memory == "host"

    @property
    def whole(self) -> NamedSharding:
        """The sharding of what every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def whole_on_host(self) -> NamedSharding:
        """The same in host memory."""
        return NamedSharding(self.mesh, PartitionSpec(), memory_kind=self.memory_kind)

    def spec(self, form: Form) -> PartitionSpec:
        """Returns the cut of the stored array among the replicas."""
        return PartitionSpec(*(None,) * form.axis, self.axes) if form.is_cut else PartitionSpec()

    def full_spec(self, form: Form) -> PartitionSpec:
        """Returns the cut of the stored array among all devices."""
        entries: list[Any] = [*form.model, *(None,) * (len(form.stored) - len(form.model))]
        if form.is_cut:
            entries[form.axis] = self.axes
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def device(self, form: Form) -> NamedSharding:
        """The sharding of the stored array in the devices' memory."""
        return NamedSharding(self.mesh, self.full_spec(form))

    def kept(self, form: Form) -> NamedSharding:
        """The sharding of the stored array where it is between steps."""
        memory_kind = self.memory_kind if form.is_cut else None
        return NamedSharding(self.mesh, self.full_spec(form), memory_kind=memory_kind)

    def takes_parts(self, shape: tuple[int, ...], dtype: Any) -> bool:
        """Returns whether an array is kept in parts: it has an element for each of them, and does not hold PRNG keys."""
        is_large = math.prod(shape) >= max(self.num_parts, self.whole_below)
        return self.num_parts > 1 and is_large and not jnp.issubdtype(dtype, jax.dtypes.prng_key)

    def form(self, shape: tuple[int, ...], model: tuple[Any, ...] = ()) -> Form:
        """Chooses how to store an array in parts with little padding; does not cut `model` axes."""
        # On devices one axis of the array is cut; of three axes and more not the first, for some
        # padding if necessary: if it is a stack, a layer can be gathered by itself. (A stack of
        # biases is small, and gathered in full.) In host memory rows are cut that span the last
        # axes. Any array could be one row of elements. But on a TPU, making a row of a matrix with
        # sides that are not multiples of its tiles takes long, to compile as well, while rows that fill
        # their tiles stay in place. Parts of parts would interleave: a `model` array without
        # another axis that divides well is not cut.
        n, size = self.num_parts, math.prod(shape)
        if self.memory == "host":
            rows = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(len(shape) - 1, 0, -1)]
            forms = [Form(shape, each, 0, _up(each[0], n)) for each in rows]
        else:
            # Parts along an early axis lie one behind the other where they are gathered.
            axes = [*range(1, len(shape)), 0] if len(shape) > 2 else range(len(shape))
            forms = [Form(shape, shape, i, _up(shape[i], n), model) for i in axes if not any(model[i : i + 1])]
        padding = [n * self._size_of_part(form) / size - 1 for form in forms]
        most = _MOST_PADDING[self.memory]
        layered = [i for i, form in enumerate(forms) if len(shape) > 2 and form.axis > 0]
        if layered and all(padding[i] > most for i in layered):
            least = min(layered, key=padding.__getitem__)
            most_of_stack = min(_MOST_PADDING_OF_STACK, n * _MORE_A_DEVICE)
            if padding[least] <= most_of_stack:
                return forms[least]
        otherwise = Form.whole(shape, model) if any(model) else Form(shape, (size,), 0, _up(size, n))
        return next((form for form, more in zip(forms, padding, strict=True) if more <= most), otherwise)

    def _size_of_part(self, form: Form) -> int:
        """Counts the elements that a part takes on a device."""
        part = list(form.part(self.num_parts))
        if (self.on_host or self.platform == "tpu") and len(part) > 1:
            part[-2:] = _up(part[-2], _TILE_ROWS), _up(part[-1], _TILE_COLUMNS)
        return math.prod(part)

    def num_elements(self, form: Form) -> int:
        """Counts the elements that a device holds of the stored array."""
        return math.prod(form.part(self.num_parts)) // math.prod(self.mesh.shape[axis] for axis in axes_of(form.model))

    def own_part(self, x: jax.Array, form: Form) -> jax.Array:
        """Takes this replica's part of an array that all hold; called where the axes are bound."""
        length = form.size // self.num_parts
        return jax.lax.dynamic_slice_in_dim(form.store(x), jax.lax.axis_index(self.axes) * length, length, form.axis)

    def all_gather(self, part: jax.Array, form: Form) -> jax.Array:
        """Gathers an array from each replica's part; called where the axes are bound."""
        if not any(form.model):
            return form.restore(jax.lax.all_gather(part, self.axes, axis=form.axis, tiled=True))
        gather = jax.custom_vjp(lambda part: self._gather_in_replica(part, form))
        # The transpose that JAX makes of it would add up over mesh axes that the array is not divided over.
        gather.defvjp(
            lambda part: (self._gather_in_replica(part, form), None), lambda _, g: (self.sum_scatter(g, form),)
        )
        return gather(part)

    def _gather_in_replica(self, part: jax.Array, form: Form) -> jax.Array:
        gather = self._inside_replica(lambda x: jax.lax.all_gather(x, self.axes, axis=form.axis, tiled=True), form)
        return form.restore(gather(part))

    def sum_scatter(self, x: jax.Array, form: Form) -> jax.Array:
        """Sums arrays over the replicas among which parts are spread; each receives its part. The transpose of `all_gather`."""

        if xla.gloo_scatters_wrongly():
            return self.sum_scatter_wide(x, form, x.dtype)

        def scatter(x: jax.Array) -> jax.Array:
            return jax.lax.psum_scatter(x, self.axes, scatter_dimension=form.axis, tiled=True)

        return self._inside_replica(scatter, form)(form.store(x))

    def sum_scatter_wide(self, x: jax.Array, form: Form, dtype: Any) -> jax.Array:
        """Sums as `sum_scatter`, in a wider dtype than the arrays have."""
        # If any device reaches any other directly, the parts are exchanged unchanged and added up
        # by their receivers: half the bytes, and no wide copy of the array. In a torus that would
        # take several times the hops of a sum on the way.
        if self.platform == "tpu":
            return self.sum_scatter(x.astype(dtype), form)
        axis = form.axis

        def exchange(x: jax.Array) -> jax.Array:
            parts = x.reshape(*x.shape[:axis], self.num_parts, -1, *x.shape[axis + 1 :])
            received = jax.lax.all_to_all(jnp.moveaxis(parts, axis, 0), self.axes, 0, 0, tiled=True)
            return received.sum(0, dtype=dtype)

        return self._inside_replica(exchange, form)(form.store(x))

    def _inside_replica(self, function: Callable[[jax.Array], jax.Array], form: Form) -> Callable[..., jax.Array]:
        """Makes a collective act on each device's share of an array divided inside a replica."""
        # The compiler would make each device gather the full array from its replica first.
        if not any(form.model):
            return function
        spec, axes = PartitionSpec(*form.model), {name for name in self.mesh.axis_names if name not in self.bound}
        return jax.shard_map(function, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=False)

    def gather(self, stored: jax.Array, form: Form) -> jax.Array:
        """Gathers the array of a stored one, both in the devices' memory and seen from outside of the replicas."""
        # In parts first: else the compiler may gather what it is computed from instead.
        parts = jax.lax.with_sharding_constraint(stored, self.device(form))
        whole = NamedSharding(self.mesh, PartitionSpec(*form.model))
        return form.restore(jax.lax.with_sharding_constraint(parts, whole))


def _up(length: int, multiple: int) -> int:
    return length + -length % multiple


def _host_memory(strategy: Strategy) -> str:
    """Finds the name of the memory of the devices' hosts; raises DeviceError where they offer none to programs."""
    offered = [memory.kind for memory in strategy.devices[0].addressable_memories()]
    kinds = [kind for kind in HOST_MEMORIES if kind in offered]
    if not offered:
        raise DeviceError(
            "central_storage keeps the state in host memory, which JAX does not describe for "
            f"{strategy.devices[0].device_kind} devices that are not here: compile for a TPU topology, or use "
            "jdist.mirrored(topology=...)."
        )
    if not kinds:
        raise DeviceError(
            f"central_storage keeps the state in host memory, which {strategy.devices[0]} does not offer; it has "
            f"{', '.join(offered)}. Use jdist.mirrored()."
        )
    return kinds[0]
