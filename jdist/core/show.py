"""Finds which device or host holds which part of a state: `jdist.show`, and `Strategy.report` on this machine's devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from jdist.core.division import aval_of, forms_or_refusal, of_optimizer, rules_by_leaf, struct_of
from jdist.core.layout import Form, Layout
from jdist.core.remote import RemoteTree
from jdist.core.rules import Rule
from jdist.core.sharded_leaf import is_sharded_leaf
from jdist.core.state_report import WHOLE, Holding, Place, StateReport, in_words
from jdist.core.step_state import pack
from jdist.errors import StepError
from jdist.support.leaves import Leaf, Way, describe, leaves_of, path_of
from jdist.support.tracebacks import without_own_frames
from jdist.support.words import counted, size
from jdist.typing import PyTree

Device = Any  # jax.Device, which type checkers take for a variable
Strategy = Any  # `jdist.core.strategy.Strategy`, which imports this file
_HOST_MEMORY = "host memory"


@without_own_frames
def show(state: PyTree) -> StateReport:
    """Shows which device, host or server holds which part of a state, where its arrays are now.

    It does not matter who put them there: `jdist.mirrored().init(...)`, a step, `jax.device_put`.
    `strategy.report(shapes)` shows what a strategy would make of a state that is not there yet.

    Args:
        state: a tree of arrays, or of `jax.ShapeDtypeStruct`s with shardings; or the handle of a state on parameter servers.

    Returns:
        The report: a notebook draws it, `print` writes it as text, `report.save("state.svg")` keeps the picture.

    Raises:
        StepError: the state is a function, or has no leaves.

    Example:
        >>> import jax.numpy as jnp, jdist
        >>> state = jdist.one_device().init(lambda: {"w": jnp.ones((3, 5))})
        >>> print(jdist.show(state))
        a state of 1 array, 60 B
          60 B on the device
          leaf   array          bytes  how it is kept  bytes a device
          ['w']  float32[3, 5]     60  whole on cpu:0              60
          all                      60  100.0% of it                60
          A  whole on cpu:0: 1 array, 60 B (['w'])
        this machine
          cpu:0    60 B  A whole

    Source: `jax.debug.visualize_array_sharding`, which shows one array.
    """
    state = _checked("jdist.show", state)
    arrays = jax.tree.leaves(state)
    if any(isinstance(x, RemoteTree) for x in arrays):
        if len(arrays) > 1:
            raise StepError(
                "jdist.show got a tree in which one leaf is a state on parameter servers; show that leaf by itself."
            )
        return arrays[0].show()
    leaves = leaves_of(state, is_sharded_leaf)
    found = {device for leaf in leaves if leaf.way is not None for device in leaf.way.part_of}
    shardings = [getattr(x, "sharding", None) for x in arrays if not isinstance(x, Tracer)]
    named = [each for each in shardings if isinstance(each, NamedSharding) and isinstance(each.mesh, Mesh)]
    mesh = next((each.mesh for each in named if each.device_set == found), None)
    here = jax.process_index() if found else None
    if not isinstance(mesh, Mesh) or len(found) == 1:
        devices = sorted(found, key=lambda device: (device.process_index, device.id))
        return _report("", leaves, devices, lambda _: "", here=here)
    return _report("", leaves, list(mesh.devices.flat), _mesh_notes(mesh), here=here)


def report(strategy: Strategy, state: PyTree | None) -> StateReport:
    """Shows a strategy's devices, and what each would hold of a state: `Strategy.report`."""
    leaves, refusal = [], None
    if state is not None:
        leaves, refusal = _planned(strategy, _checked("strategy.report", state))
    devices = strategy.devices or tuple(jnp.zeros(()).devices())
    num_hosts = len({d.process_index for d in devices})
    hosts_are = "process" if strategy.topology is None else "host"
    replicas = counted(strategy.num_replicas, "replica")
    if strategy.model_axes:
        replicas += f" of {len(devices) // strategy.num_replicas} devices each"
    where = strategy.topology or f"{devices[0].platform} ({devices[0].device_kind})"
    title = (
        f"{strategy.name}: {replicas}, {counted(len(devices), 'device')} of {counted(num_hosts, hosts_are)}, {where}"
    )
    here = None if strategy.topology is not None else strategy.cluster.process_index
    return _report(title, leaves, devices, _replica_notes(strategy), refusal, hosts_are=hosts_are, here=here)


def _checked(who: str, state: PyTree) -> PyTree:
    """Packs a state; refuses a function, and one without leaves."""
    if callable(state) and any(x is state for x in jax.tree.leaves(state)):
        raise StepError(
            f"{who} got a function; it takes a state, such as `strategy.init(create, key)` returns, or `strategy.report` its "
            "shapes: `strategy.report(jax.eval_shape(create, key))`."
        )
    state = pack(state)
    if not jax.tree.leaves(state):
        raise StepError(
            f"{who} got a state without arrays ({type(state).__name__}); give it one such as `strategy.init(create, key)` "
            "returns."
        )
    return state


def _planned(strategy: Strategy, state: PyTree) -> tuple[list[Leaf], str | None]:
    """Describes the leaves of a state as a strategy keeps them, and says why it refuses such a state, if it does."""
    found = jax.tree.leaves_with_path(state, is_leaf=is_sharded_leaf)
    if any(isinstance(x, RemoteTree) for _, x in found):
        raise StepError(
            f"this state is on parameter servers, and {strategy.name} has none. Show it by `jdist.show(state)`."
        )
    if strategy.parts is None:
        structs, why, refusal = [_placed(strategy, x) for _, x in found], [""] * len(found), None
    else:
        layout = Layout.of(strategy)
        forms, refusal = forms_or_refusal(strategy, state, is_all=False)
        structs = [struct_of(layout, x, form) for (_, x), form in zip(found, forms, strict=True)]
        rules = rules_by_leaf(strategy, state, is_all=False)
        why = [_why(layout, *each) for each in zip(structs, forms, rules, strict=True)]
    leaves = [describe(path_of(path), struct) for (path, _), struct in zip(found, structs, strict=True)]
    notes = zip(leaves, why, of_optimizer(state)[0], strict=True)
    return [replace(leaf, kept=leaf.kept + text, of_optimizer=flag) for leaf, text, flag in notes], refusal


def _placed(strategy: Strategy, x: Any) -> jax.ShapeDtypeStruct:
    """Describes a leaf of a state under a strategy that keeps arrays whole."""
    sharding, aval = strategy.replicated_sharding or jnp.zeros(()).sharding, aval_of(x)
    # Residuals of compressed gradients stay unchanged: each replica has its own part.
    if isinstance(x, jax.Array) and not x.is_deleted() and not x.sharding.is_fully_replicated:
        sharding = x.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def _why(layout: Layout, x: Any, form: Form, rule: Rule | None) -> str:
    """Says why an array is whole, or by which rule it is divided."""
    text = ""
    if not form.is_cut and x.size and layout.num_parts > 1:
        text = ": no state of an optimiser" if rule is None else ": no other axis divides well, or no optimiser's state"
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            text = ": a PRNG key"
        elif not layout.takes_parts(x.shape, x.dtype):
            text = f": fewer than {max(layout.whole_below, layout.num_parts):,} elements"
    if rule is not None:
        text += f", by {'the metadata' if rule.pattern is None else repr(rule.pattern)}"
    return text


def _report(
    title: str,
    leaves: Sequence[Leaf],
    devices: Sequence[Device],
    note: Callable[[Device], str],
    refusal: str | None = None,
    *,
    hosts_are: str = "process",
    here: int | None,
) -> StateReport:
    """Makes a report of leaves, on devices grouped by host, and hosts grouped by slice."""
    by_way: dict[Way, list[Leaf]] = {}
    for leaf in leaves:
        if leaf.way is not None:
            by_way.setdefault(leaf.way, []).append(leaf)
    slices: dict[int, dict[int, list[Device]]] = {}
    for device in devices:
        # Only of a TPU is a slice more than a host.
        index = (getattr(device, "slice_index", None) or 0) if device.platform == "tpu" else 0
        slices.setdefault(index, {}).setdefault(device.process_index, []).append(device)
    num_hosts = len({device.process_index for device in devices})

    def host(index: int, members: Sequence[Device]) -> Place:
        name = f"{hosts_are} {index}" if num_hosts > 1 or here is None else "this machine"
        name += " (this one)" if num_hosts > 1 and index == here else ""
        memory = Place(_HOST_MEMORY, "", _holdings(by_way, members, on_host=True))
        places = [Place(f"{d.platform}:{d.id}", note(d), _holdings(by_way, [d], on_host=False)) for d in members]
        return Place(name, places=(*([memory] if memory.holdings else []), *places))

    groups = [[host(*each) for each in sorted(hosts.items())] for _, hosts in sorted(slices.items())]
    places = groups[0] if len(groups) == 1 else [Place(f"slice {i}", places=tuple(g)) for i, g in enumerate(groups)]
    if not devices:
        places = [
            Place("this machine", places=(Place(_HOST_MEMORY, "", _holdings(by_way, (), on_host=True)),)),
        ]
    state = f"a state of {counted(len(leaves), 'array')}, {size(sum(leaf.num_bytes for leaf in leaves))}"
    where = "on each device" if len(devices) > 1 else "on the device"
    summary = _summary(leaves, where, sorted({each.num_bytes for group in places for each in _devices_in(group)}))
    ways = [in_words(way.how, each, sum(leaf.part_bytes for leaf in each)) for way, each in by_way.items()]
    summary = f"{state}; {summary}" if title and leaves else summary
    return StateReport(title or state, summary, tuple(leaves), tuple(ways), tuple(places), refusal)


def _holdings(by_way: dict[Way, list[Leaf]], devices: Sequence[Device], *, on_host: bool) -> tuple[Holding, ...]:
    """Lists what a device has in its memory, or the host of some devices in its own."""
    found = []
    for number, (way, leaves) in enumerate(by_way.items()):
        parts = sorted({way.part_of[d] for d in devices if d in way.part_of}) if way.part_of else [0]
        if way.on_host != on_host or not parts:
            continue
        n = way.num_parts
        spans = tuple((part / n, (part + 1) / n) for part in parts) if len(parts) < n else WHOLE
        # Of an array that several devices have in the host's memory JAX keeps a copy for each.
        copies = sum(d in way.part_of for d in devices) if way.part_of and on_host else len(parts)
        label = _label(parts, n) + (f", {copies:,} copies" if copies > len(parts) == 1 else "")
        found.append(Holding(number, spans, label, sum(leaf.part_bytes for leaf in leaves) * copies))
    return tuple(found)


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


def _summary(leaves: Sequence[Leaf], where: str, held: Sequence[int]) -> str:
    """Says how much each device holds, from the different amounts that they hold."""
    if not leaves:
        return "give it a state, or its shapes, to see what each device holds"
    if held[-1:] in ([], [0]):
        return "nothing of it in the devices' memory"
    total = sum(leaf.num_bytes for leaf in leaves)
    least = f"{size(held[0])} to " if len(held) > 1 else ""
    share = ""
    if held[-1] < total:
        share = f" ({'less than 0.01%' if held[-1] / total < 1e-4 else f'{held[-1] / total:.2%}'} of it)"
    return f"{least}{size(held[-1])} {where}{share}"


def _devices_in(place: Place) -> Iterable[Place]:
    if not place.places:
        return [] if place.name == _HOST_MEMORY else [place]
    return [device for each in place.places for device in _devices_in(each)]


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
