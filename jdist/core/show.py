"""Finds which device, host or server holds which part of a state: `jdist.show` and `Strategy.show`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh

from jdist.core.division import forms_or_refusal, is_in_place, shapes_or_refusal
from jdist.core.layout import Layout
from jdist.core.placement import HOST_MEMORY, Device, Ways, stored_in
from jdist.core.remote import RemoteTree
from jdist.core.sharded_leaf import ShardedLeaf, is_sharded_leaf, num_parts_of
from jdist.core.state_picture import Group, Place, StatePicture
from jdist.core.step_state import pack
from jdist.errors import StepError
from jdist.support.tracebacks import without_own_frames
from jdist.support.units import counted

PyTree = Any
Strategy = Any  # `jdist.core.strategy.Strategy`, which imports this file


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
    ways = Ways()
    for path, leaf in leaves:
        ways.add(path, leaf)
    devices = sorted(ways.devices, key=lambda d: (d.process_index, d.id))
    meshes = [m for m in ways.meshes if set(m.devices.flat) == ways.devices]
    note = _mesh_notes(meshes[0]) if meshes and len(devices) > 1 else lambda _: ""
    order = list(meshes[0].devices.flat) if meshes else devices
    return ways.picture("", _hosts(order, note, ways, hosts_are="process", here=jax.process_index if devices else None))


def show_under(strategy: Strategy, state: PyTree | None) -> StatePicture:
    """Shows a strategy's devices, and what each holds of a state: `Strategy.show`."""
    ways, refusal = Ways(), None
    if state is not None:
        leaves = _leaves("strategy.show", state)
        if any(isinstance(x, RemoteTree) for _, x in leaves):
            raise StepError(
                f"this state is on parameter servers, and {strategy.name} has none. Show it by `jdist.show(state)`."
            )
        if all(isinstance(stored_in(x), jax.ShapeDtypeStruct) for _, x in leaves):
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


def _hosts(
    devices: Sequence[Device],
    note: Callable[[Device], str],
    ways: Ways,
    *,
    hosts_are: str,
    here: Callable[[], int] | None,
) -> tuple[Group, ...]:
    """Groups devices by host, and hosts by slice, each with what it holds."""
    if not devices:
        return (Group("this machine", (Place(HOST_MEMORY, "", ways.holdings((), on_host=True)),)),)
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
        return Group(name, (*([Place(HOST_MEMORY, "", in_host)] if in_host else []), *places))

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


def _placed(leaf: Any) -> Any:
    """Puts what no strategy places on the device that JAX chooses."""
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jnp.zeros(()).sharding)
    return leaf


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
    stored = stored_in(leaf)
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
        stored = stored_in(leaf)
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
            parts = num_parts_of(stored_in(leaf).sharding) if isinstance(leaf, ShardedLeaf) else 1
            where = f"in {parts:,} parts" if parts > 1 else "whole"
            raise StepError(
                f"strategy.show: this state is not of {strategy.name}, which keeps leaf {path} "
                f"{f'in {layout.num_parts:,} parts' if form.is_cut else 'whole'}: leaf {path} is {where}. {remedy}"
            )
