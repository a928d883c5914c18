"""How the arrays of a state are kept: which part of each is on which device, or on the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jdist.core.layout import axes_of
from jdist.core.sharded_leaf import ShardedLeaf
from jdist.core.state_picture import Division, Group, Holding, Place, StatePicture
from jdist.core.state_report import itemsize_of
from jdist.support.units import counted, size

Device = Any  # jax.Device, which type checkers take for a variable
HOST_MEMORY = "host memory"
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


class Ways:
    """The ways in which the arrays of a state are kept, and what each device has of them."""

    def __init__(self) -> None:
        self.devices: set[Device] = set()
        self.meshes: list[Any] = []
        self._ways: dict[Any, _Way] = {}
        self._arrays: dict[Any, _Arrays] = {}

    def add(self, path: str, leaf: Any) -> None:
        """Takes in an array."""
        stored = stored_in(leaf)
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
                # Of an array that several devices have in the host's memory JAX keeps a copy for each.
                copies = sum(d in way.part_of for d in devices) if way.part_of and on_host else len(parts)
                label = _label(parts, n) + (f", {copies:,} copies" if copies > len(parts) == 1 else "")
                found.append(Holding(number, spans, label, each * copies))
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
        elif member.name != HOST_MEMORY:
            yield member


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


def stored_in(leaf: Any) -> Any:
    """Returns what JAX holds of a leaf: of one in parts the array of them."""
    return leaf.stored if isinstance(leaf, ShardedLeaf) else leaf


def _key(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Any:
    """Makes a key that is equal for shardings by which each device has the same parts."""
    if isinstance(sharding, NamedSharding):
        return sharding.mesh, tuple(_cut_axes(sharding)), sharding.memory_kind
    return frozenset(_parts_by_index(sharding, shape).items()), sharding.memory_kind


def _cut_axes(sharding: NamedSharding) -> list[str]:
    """Lists the mesh axes over which an array is divided, in the order of its parts."""
    return [axis for axis in axes_of(sharding.spec) if sharding.mesh.shape[axis] > 1]


def _parts_by_index(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[Device, int]:
    """Numbers the parts of an array by their order in it."""
    starts = {
        device: tuple(each.start or 0 for each in index)
        for device, index in sharding.devices_indices_map(shape).items()
    }
    numbers = {start: i for i, start in enumerate(sorted(set(starts.values())))}
    return {device: numbers[start] for device, start in starts.items()}


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
