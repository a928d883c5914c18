"""Finds which device, host or server holds which part of a state: `jdist.show` and `Strategy.show`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding

from jdist.core.division import forms_or_refusal, is_in_place, shapes_or_refusal
from jdist.core.layout import Layout, axes_of
from jdist.core.remote import RemoteTree
from jdist.core.sharded_leaf import ShardedLeaf, is_sharded_leaf, num_parts_of
from jdist.core.state_picture import Division, Group, Holding, Place, StatePicture
from jdist.core.state_report import itemsize_of
from jdist.core.step_state import pack
from jdist.errors import StepError
from jdist.support.tracebacks import without_own_frames
from jdist.support.units import counted, size

PyTree = Any
Device = Any  # jax.Device, which type checkers take for a variable
Strategy = Any  # `jdist.core.strategy.Strategy`, which imports this file
_HOST = "host"


@dataclass(frozen=True, eq=False)
class _Way:
    """A way in which arrays are kept: by which device, or by the host, and which part each has."""

    how: str
    num_parts: int
    part_of: dict[Any, int]  # by device; of what only a host has, empty
    on_host: bool = False


@dataclass
class _Arrays:
    """The arrays that are kept in one way."""

    names: list[tuple[int, str]] = field(default_factory=list)  # with their bytes
    part_bytes: int = 0


@without_own_frames
def show(state: PyTree) -> StatePicture:
    """Shows which device, host or server holds which part of a state.

    Arrays are shown where they are now, whatever put them there: `jdist.mirrored().init(...)`, a step, `jax.device_put`.
    What a strategy would make of a state that is not there yet shows `strategy.show(shapes)`.

    Args:
        state: a tree of arrays, of `jax.ShapeDtypeStruct`s with shardings, or of NumPy arrays; or the handle of a state on
            parameter servers.

    Returns:
        The picture: a notebook draws it, `print` writes it as text, `picture.save("state.svg")` keeps it.

    Raises:
        StepError: the state has no arrays, or one that was deleted, is traced, or of which nobody knows where it is.

    Example:
        >>> import jax.numpy as jnp, jdist
        >>> state = jdist.one_device().init(lambda: {"w": jnp.ones((3, 5))})
        >>> print(jdist.show(state))
        a state of 1 array, 60 B
          60 B on the device
          A  whole on cpu:0: 1 array, 60 B (['w'])
        this machine
          cpu:0  60 B  A whole

    Source: `jax.debug.visualize_array_sharding`, which shows one array.
    """
    leaves = _leaves("jdist.show", state)
    if any(isinstance(x, RemoteTree) for _, x in leaves):
        if len(leaves) > 1:
            raise StepError(
                "jdist.show got a tree in which one leaf is a state on parameter servers; show that leaf by itself."
            )
        return leaves[0][1].show()
    ways = _Ways()
    for path, leaf in leaves:
        ways.add(path, leaf)
    devices = sorted(ways.devices, key=lambda d: (d.process_index, d.id))
    meshes = [m for m in ways.meshes if set(m.devices.flat) == ways.devices]
    note = _mesh_notes(meshes[0]) if meshes and len(devices) > 1 else lambda _: ""
    order = list(meshes[0].devices.flat) if meshes else devices
    return ways.picture("", _hosts(order, note, ways, hosts_are="process", here=jax.process_index if devices else None))


def show_under(strategy: Strategy, state: PyTree | None) -> StatePicture:
    """Shows a strategy's devices, and what each holds of a state: `Strategy.show`."""
    ways, refusal = _Ways(), None
    if state is not None:
        leaves = _leaves("strategy.show", state)
        if any(isinstance(x, RemoteTree) for _, x in leaves):
            raise StepError(
                f"this state is on parameter servers, and {strategy.name} has none. Show it by `jdist.show(state)`."
            )
        if all(isinstance(_stored(x), jax.ShapeDtypeStruct) for _, x in leaves):
            planned, refusal = shapes_or_refusal(strategy, pack(state), is_all=False)
            leaves = [(path, _placed(x)) for path, x in _leaves("strategy.show", planned)]
        else:
            _check_laid_out(strategy, state, leaves)
        for path, leaf in leaves:
            ways.add(path, leaf)
    devices = strategy.devices or tuple(ways.devices) or tuple(jnp.zeros(()).devices())
    for device in devices:
        ways.devices.add(device)
    hosts_are = "host" if strategy.topology is not None else "process"
    num_hosts = len({d.process_index for d in devices})
    replicas = counted(strategy.num_replicas, "replica")
    if strategy.model_axes:
        replicas += f" of {len(devices) // strategy.num_replicas} devices each"
    where = strategy.topology or f"{devices[0].platform} ({devices[0].device_kind})"
    title = (
        f"{strategy.name}: {replicas}, {counted(len(devices), 'device')} of {counted(num_hosts, hosts_are)}, {where}"
    )
    here = None if strategy.topology is not None else lambda: strategy.cluster.process_index
    groups = _hosts(devices, _replica_notes(strategy), ways, hosts_are=hosts_are, here=here)
    return ways.picture(title, groups, refusal)


class _Ways:
    """The ways in which the arrays of a state are kept, and what each device has of them."""

    def __init__(self) -> None:
        self.devices: set[Device] = set()
        self.meshes: list[Any] = []
        self._ways: dict[Any, _Way] = {}
        self._arrays: dict[Any, _Arrays] = {}

    def add(self, path: str, leaf: Any) -> None:
        """Takes in an array."""
        stored = _stored(leaf)
        itemsize = itemsize_of(stored.dtype)
        num_bytes = math.prod(leaf.shape) * itemsize
        part_bytes = num_bytes
        if isinstance(stored, np.ndarray):
            key: Any = _HOST
            if key not in self._ways:
                self._ways[key] = _Way("on the host, as NumPy arrays or numbers", 1, {}, on_host=True)
        else:
            sharding = stored.sharding
            part_bytes = math.prod(sharding.shard_shape(stored.shape)) * itemsize
            key = _key(sharding, stored.shape)
            if key not in self._ways:
                self._ways[key] = _way(sharding, stored.shape)
                self.devices |= sharding.device_set
                if isinstance(sharding, NamedSharding) and sharding.mesh not in self.meshes:
                    self.meshes.append(sharding.mesh)
        arrays = self._arrays.setdefault(key, _Arrays())
        arrays.names.append((num_bytes, path))
        arrays.part_bytes += part_bytes

    def holdings(self, devices: Sequence[Device], *, on_host: bool) -> tuple[Holding, ...]:
        """Lists what a device has in its memory, or the host of some devices in its own."""
        found = []
        for number, (key, way) in enumerate(self._ways.items()):
            if way.on_host != on_host:
                continue
            parts = sorted({way.part_of[d] for d in devices if d in way.part_of}) if way.part_of else [0]
            if parts and (way.part_of or on_host):
                n, each = way.num_parts, self._arrays[key].part_bytes
                spans = tuple((part / n, (part + 1) / n) for part in parts) if len(parts) < n else ((0.0, 1.0),)
                found.append(Holding(number, spans, _label(parts, n), each * len(parts)))
        return tuple(found)

    def picture(self, title: str, groups: tuple[Group, ...], refusal: str | None = None) -> StatePicture:
        """Makes the picture."""
        divisions = []
        for key, way in self._ways.items():
            arrays = self._arrays[key]
            names = tuple(name for _, name in sorted(arrays.names, key=lambda named: -named[0]))
            total = sum(num_bytes for num_bytes, _ in arrays.names)
            divisions.append(Division(way.how, names, total, arrays.part_bytes))
        total = sum(each.num_bytes for each in divisions)
        state = f"a state of {counted(sum(len(each.names) for each in divisions), 'array')}, {size(total)}"
        held = sorted({place.num_bytes for group in groups for place in _devices_in(group)})
        if not divisions:
            summary = "give it a state, or its shapes, to see what each device holds"
        elif held[-1:] in ([], [0]):
            summary = f"{state}: nothing of it in the devices' memory"
        else:
            least = f"{size(held[0])} to " if len(held) > 1 else ""
            share = f" ({_percent(held[-1] / total)} of it)" if total and held[-1] < total else ""
            whose = "on each device" if len(self.devices) > 1 else "on the device"
            summary = f"{least}{size(held[-1])} {whose}{share}"
            summary = f"{state}; {summary}" if title else summary
        return StatePicture(title or state, summary, tuple(divisions), groups, refusal)


def _percent(share: float) -> str:
    return "less than 0.01%" if 0 < share < 1e-4 else f"{share:.2%}"


def _devices_in(group: Group) -> Iterable[Place]:
    for member in group.members:
        if isinstance(member, Group):
            yield from _devices_in(member)
        elif member.name != _HOST_MEMORY:
            yield member


_HOST_MEMORY = "host memory"


def _hosts(
    devices: Sequence[Device],
    note: Callable[[Device], str],
    ways: _Ways,
    *,
    hosts_are: str,
    here: Callable[[], int] | None,
) -> tuple[Group, ...]:
    """Groups devices by host, and hosts by slice, each with what it holds."""
    if not devices:
        return (Group("this machine", (Place(_HOST_MEMORY, "", ways.holdings((), on_host=True)),)),)
    slices: dict[int, dict[int, list[Device]]] = {}
    for device in devices:
        # Only of a TPU is a slice more than a host.
        index = (getattr(device, "slice_index", None) or 0) if device.platform == "tpu" else 0
        slices.setdefault(index, {}).setdefault(device.process_index, []).append(device)
    num_hosts = len({device.process_index for device in devices})
    is_here = None if here is None else here()

    def host(index: int, members: Sequence[Device]) -> Group:
        name = f"{hosts_are} {index}" if num_hosts > 1 or is_here is None else "this machine"
        name += " (this one)" if num_hosts > 1 and index == is_here else ""
        in_host = ways.holdings(members, on_host=True)
        places = [Place(f"{d.platform}:{d.id}", note(d), ways.holdings([d], on_host=False)) for d in members]
        return Group(name, (*([Place(_HOST_MEMORY, "", in_host)] if in_host else []), *places))

    groups = {
        index: tuple(host(each, members) for each, members in sorted(hosts.items()))
        for index, hosts in sorted(slices.items())
    }
    if len(groups) == 1:
        return next(iter(groups.values()))
    return tuple(Group(f"slice {index}", hosts) for index, hosts in groups.items())


def _replica_notes(strategy: Strategy) -> Callable[[Device], str]:
    """Makes a function that says which replica a device is, or is in."""
    if strategy.mesh is None:
        return lambda _: ""
    each = len(strategy.devices) // strategy.num_replicas
    places = {device: i for i, device in enumerate(strategy.devices)}
    names, sizes = strategy.mesh.axis_names, strategy.mesh.devices.shape

    def note(device: Device) -> str:
        text = f"replica {places[device] // each:,}"
        index = np.unravel_index(places[device], sizes)
        text += "".join(f", {axis} {index[names.index(axis)]:,}" for axis in strategy.model_axes)
        coords = getattr(device, "coords", None)
        return f"{text} at {tuple(coords)}" if coords is not None else text

    return note


def _mesh_notes(mesh: Any) -> Callable[[Device], str]:
    """Makes a function that says where a device is in a mesh."""
    at = {device: index for index, device in np.ndenumerate(mesh.devices)}
    return lambda d: ", ".join(f"{axis} {i:,}" for axis, i in zip(mesh.axis_names, at[d], strict=True))


def _label(parts: Sequence[int], num_parts: int) -> str:
    if num_parts == 1:
        return "whole"
    if len(parts) == num_parts:
        return f"all {num_parts:,} parts"
    if len(parts) == 1:
        return f"part {parts[0]:,} of {num_parts:,}"
    if parts[-1] - parts[0] == len(parts) - 1:
        return f"parts {parts[0]:,} to {parts[-1]:,} of {num_parts:,}"
    return f"{len(parts):,} of {num_parts:,} parts"


def _placed(leaf: Any) -> Any:
    """Puts what no strategy places on the device that JAX chooses."""
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jnp.zeros(()).sharding)
    return leaf


def _stored(leaf: Any) -> Any:
    return leaf.stored if isinstance(leaf, ShardedLeaf) else leaf


def _key(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Any:
    """Makes a key that is equal for shardings by which each device has the same parts."""
    if isinstance(sharding, NamedSharding):
        return sharding.mesh, frozenset(_cut_axes(sharding)), sharding.memory_kind
    return frozenset(_parts_by_index(sharding, shape).items()), sharding.memory_kind


def _cut_axes(sharding: NamedSharding) -> list[str]:
    """Lists the mesh axes over which an array is divided, in the order of the mesh."""
    cut = set(axes_of(sharding.spec))
    return [axis for axis in sharding.mesh.axis_names if axis in cut and sharding.mesh.shape[axis] > 1]


def _parts_by_index(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[Device, int]:
    """Numbers the parts of an array by the order of the devices that have them."""
    indices = {device: str(index) for device, index in sharding.devices_indices_map(shape).items()}
    numbers = {index: i for i, index in enumerate(dict.fromkeys(indices.values()))}
    return {device: numbers[index] for device, index in indices.items()}


def _way(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> _Way:
    kind = sharding.memory_kind
    devices = sharding.device_set
    default = next(iter(devices)).default_memory().kind if kind is not None and kind.endswith("host") else kind
    on_host = kind != default
    where = " in host memory" if on_host else ""
    if isinstance(sharding, NamedSharding):
        mesh: Any = sharding.mesh  # a mesh of devices: an abstract one was refused
        axes = _cut_axes(sharding)
        sizes = [mesh.shape[axis] for axis in axes]
        numbers = (
            np.ravel_multi_index([np.indices(mesh.devices.shape)[mesh.axis_names.index(axis)] for axis in axes], sizes)
            if axes
            else np.zeros(mesh.devices.shape, int)
        )
        part_of = dict(zip(mesh.devices.flat, map(int, numbers.flat), strict=True))
        over = (
            " x ".join(f"{axis}={n}" for axis, n in zip(axes, sizes, strict=True)) if len(axes) > 1 else "".join(axes)
        )
    else:
        part_of, over = _parts_by_index(sharding, shape), ""
    num_parts = 1 + max(part_of.values())
    if num_parts == 1:
        one = next(iter(devices))
        how = f"whole on {one.platform}:{one.id}" if len(devices) == 1 else f"whole on each of {len(devices):,} devices"
        return _Way(how + where, 1, part_of if len(devices) > 1 else {one: 0}, on_host)
    copies = len(devices) // num_parts
    how = f"in {num_parts:,} parts{f' over {over}' if over else ''}{where}"
    return _Way(how + (f", {copies:,} copies of each" if copies > 1 else ""), num_parts, part_of, on_host)


def _leaves(who: str, state: PyTree) -> list[tuple[str, Any]]:
    """Lists the arrays of a state by path; refuses what has no place."""
    if callable(state) and any(x is state for x in jax.tree.leaves(state)):
        raise StepError(
            f"{who} got a function; it takes a state, such as `strategy.init(create, key)` returns, or `strategy.show` its "
            "shapes, `jax.eval_shape(create, key)`."
        )
    leaves = [
        (jax.tree_util.keystr(path).removeprefix(".") or "itself", leaf)
        for path, leaf in jax.tree.leaves_with_path(pack(state), is_leaf=is_sharded_leaf)
    ]
    if not leaves:
        raise StepError(
            f"{who} got a state without arrays ({type(state).__name__}); give it one such as `strategy.init(create, key)` "
            "returns."
        )
    return [(path, _checked(who, path, leaf)) for path, leaf in leaves]


def _checked(who: str, path: str, leaf: Any) -> Any:
    stored = _stored(leaf)
    if isinstance(stored, RemoteTree):
        return leaf
    if isinstance(stored, Tracer):
        raise StepError(f"{who}: leaf {path} is traced: within a step an array has no place. Show the state outside.")
    if isinstance(stored, jax.Array):
        if stored.is_deleted():
            raise StepError(
                f"{who}: leaf {path} was deleted: a step consumes the state that it is given. Show the state that it has "
                "returned."
            )
        return leaf
    if isinstance(stored, jax.ShapeDtypeStruct):
        mesh = getattr(stored.sharding, "mesh", None)
        if who == "jdist.show" and (stored.sharding is None or isinstance(mesh, AbstractMesh)):
            raise StepError(
                f"{who}: of leaf {path} only the shape is known. `strategy.show(shapes)` shows where a strategy would put it."
            )
        return leaf
    if isinstance(stored, np.ndarray | np.generic | bool | int | float | complex):
        return np.asarray(stored, jnp.result_type(stored))
    raise StepError(f"{who}: leaf {path} is a {type(stored).__name__}; a state has arrays and numbers.")


def _check_laid_out(strategy: Strategy, state: PyTree, leaves: Sequence[tuple[str, Any]]) -> None:
    """Refuses a state that a strategy has not laid out."""
    remedy = (
        "`strategy.init(create, key)` makes one that is; `strategy.show(jax.eval_shape(create, key))` shows what it would be, "
        "and `jdist.show(state)` where this one is."
    )
    wanted = set(strategy.devices)
    for path, leaf in leaves:
        stored = _stored(leaf)
        if isinstance(stored, np.ndarray):
            where = "on the host"
        elif isinstance(stored, jax.ShapeDtypeStruct):
            where = "no array but a shape, beside arrays"
        elif wanted and set(stored.sharding.device_set) != wanted:
            count = len(stored.sharding.device_set)
            one = next(iter(stored.sharding.device_set))
            where = f"on {one.platform}:{one.id}" if count == 1 else f"on {count:,} devices"
        else:
            continue
        raise StepError(f"strategy.show: this state is not of {strategy.name}: leaf {path} is {where}. {remedy}")
    if strategy.parts is None:
        cut = [path for path, leaf in leaves if isinstance(leaf, ShardedLeaf)]
        if cut:
            raise StepError(
                f"strategy.show: this state is not of {strategy.name}, which keeps arrays whole: leaf {cut[0]} is in parts. "
                f"{remedy}"
            )
        return
    layout, chosen = Layout.of(strategy), forms_or_refusal(strategy, pack(state), is_all=False)[0]
    for (path, leaf), form in zip(leaves, chosen, strict=True):
        if not is_in_place(layout, leaf, form) and (form.is_cut or isinstance(leaf, ShardedLeaf)):
            parts = num_parts_of(_stored(leaf).sharding) if isinstance(leaf, ShardedLeaf) else 1
            where = f"in {parts:,} parts" if parts > 1 else "whole"
            raise StepError(
                f"strategy.show: this state is not of {strategy.name}, which keeps leaf {path} "
                f"{f'in {layout.num_parts:,} parts' if form.is_cut else 'whole'}: leaf {path} is {where}. {remedy}"
            )
