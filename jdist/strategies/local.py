"""Operations, mesh and parts of a state of the strategies with the same program in all processes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jdist.core.layout import axes_of
from jdist.core.operations import Operations, Parts, Shard
from jdist.core.replica_mesh import Device, Transform
from jdist.core.rules import Rule
from jdist.core.show import report
from jdist.core.strategy import Strategy
from jdist.errors import StrategyError
from jdist.reduction import Reduction
from jdist.sharded_state.operations import with_parts
from jdist.step import feed, placement
from jdist.step.mesh_step import DistributedStep
from jdist.step.run_on_replicas import run
from jdist.support import checks


def describe(strategy: Strategy) -> str:
    """Describes the replicas, their devices and processes, and how a step becomes one over the mesh."""
    if strategy.mesh is None:
        return "the step runs unchanged, on the device that JAX chooses"
    devices, cluster = strategy.devices, strategy.cluster
    kinds = sorted({d.device_kind for d in devices})
    ids = [d.id for d in devices]
    shown = str(ids) if len(ids) <= 8 else f"[{ids[0]}, {ids[1]}, ..., {ids[-1]}]"
    axes = " x ".join(f"{axis}={size}" for axis, size in strategy.mesh.shape.items())
    replicas = "1 replica" if strategy.num_replicas == 1 else f"{strategy.num_replicas} replicas"
    if strategy.model_axes:
        replicas += f" of {len(devices) // strategy.num_replicas} devices each"
    if cluster.num_processes > 1:
        replicas += f" in {cluster.num_processes} processes (this is number {cluster.process_index}),"
    if strategy.parts is not None and strategy.parts.axes and strategy.parts.memory == "device":
        size = math.prod(strategy.mesh.shape[axis] for axis in strategy.parts.axes)
        what = "the state" if strategy.parts.of == "state" else "the optimiser's state"
        replicas += f" with {what} in {size} parts"
    return (
        f"{replicas} on {devices[0].platform} devices {shown} ({', '.join(kinds)}), mesh {axes}, "
        f"transform {strategy.transform}, all-reduce {strategy.reduction.name}"
    )


LOCAL = Operations(
    init=placement.init,
    fetch=placement.fetch,
    check=placement.check,
    run=run,
    feed_batches=feed.feed_batches,
    feed_pipelines=feed.feed_pipelines,
    distribute=DistributedStep,
    describe=describe,
    report=report,
)


def strategy_over(
    devices: tuple[Device, ...],
    *,
    name: str,
    axis: str,
    transform: Transform,
    reduction: Reduction,
    operations: Operations = LOCAL,
    topology: str | None = None,
    parts: Parts | None = None,
    shard: Shard | Mapping[str, Any] | None = None,
) -> Strategy:
    """Makes a strategy with one replica a device, in this order, unless `shard` has a mesh."""
    check_axis(axis)
    fits = reduction.num_replicas in (None, len(devices))
    if not fits and len(devices) > 1:  # a single replica reduces nothing
        raise StrategyError(
            f"the all-reduce {reduction.name} is for {reduction.num_replicas} replicas, but there are {len(devices)}, one a "
            "device. Give it sizes with that product, or name as many `devices`."
        )
    # Auto, not the default Explicit: sharding must not become part of every array's type inside users' models.
    mesh = Mesh(np.array(devices), (axis,), axis_types=(AxisType.Auto,))
    strategy = Strategy(
        name=name,
        devices=devices,
        mesh=mesh,
        axes=(axis,),
        transform=transform,
        reduction=reduction,
        operations=operations,
        topology=topology,
        parts=parts,
    )
    return strategy if shard is None else _spread_state(strategy, shard)


def check_axis(axis: str) -> None:
    """Raises StrategyError for what is not a name of a mesh axis."""
    if not isinstance(axis, str) or not axis.isidentifier():
        raise StrategyError(f'`axis` is {axis!r}; it must be a name such as "replica" or "batch".')


def check_transform(transform: str, topology: str | None) -> None:
    """Refuses unknown transforms, and for absent devices one that cannot compile."""
    # JAX runs pmap's batches through a small program of their own, for which it wants real devices.
    allowed = [t for t in get_args(Transform) if topology is None or t != "pmap"]
    checks.choice("transform", transform, allowed, StrategyError)


def check_reduction(reduction: Reduction, transform: Transform) -> None:
    """Raises StrategyError for an all-reduce algorithm that a transform would leave out."""
    if transform == "jit" and reduction.name != "psum":
        raise StrategyError(
            f'`all_reduce` is {reduction.name} and `transform` is "jit", under which the compiler places the all-reduces and '
            'chooses their algorithm. Leave `all_reduce` out, or use transform="shard_map".'
        )


# ---- states in parts

_SHARD_DEFAULTS = {"of": "state", "within": None, "whole_below": 1024, "most_whole": 0.02, "mesh": None, "rules": ()}


def _spread_state(strategy: Strategy, shard: Shard | Mapping[str, Any]) -> Strategy:
    """Makes a one-axis strategy keep the state in parts instead of a copy on every device."""
    # A mapping has `of`, `within`, `whole_below`, `most_whole`, `mesh` and `rules`, as
    # `jdist.sharded` takes them.
    given = dict(shard) if isinstance(shard, Mapping) else {"of": shard}
    checks.known_options("`shard`", given, _SHARD_DEFAULTS, StrategyError)
    options = {**_SHARD_DEFAULTS, **given}
    checks.choice("shard", options["of"], get_args(Shard), StrategyError)
    if strategy.transform != "shard_map":
        raise StrategyError(
            f'`shard` keeps the state in parts, which takes transform="shard_map"; `transform` is {strategy.transform!r}. '
            "Leave it out."
        )
    if strategy.reduction.name != "psum":
        raise StrategyError(
            f"`all_reduce` is {strategy.reduction.name}, and `shard` keeps the state in parts: gradients are then summed part "
            "by part, each where it is needed. Leave one of them out."
        )
    fewer = "Arrays of fewer elements stay whole."
    whole_below = checks.whole_number("whole_below", options["whole_below"], StrategyError, least=0, fix=fewer)
    most_whole = checks.as_real(options["most_whole"])
    if most_whole is None or not 0 <= most_whole <= 1:
        raise StrategyError(
            f"`most_whole` is {options['most_whole']!r}; it must be a share of the state's bytes, from 0 to 1."
        )
    (axis,) = strategy.axes
    model = _model_axes(options["mesh"], axis, len(strategy.devices))
    rules = _rules(options["rules"], model, axis)
    num_replicas = len(strategy.devices) // math.prod(model.values())
    size = _size_of_group(options["within"], num_replicas)
    if size == 1 and not model:
        return strategy
    if size in (1, num_replicas):
        axes, sizes = (axis,), (num_replicas,)
    else:
        # Neither is called `axis`: a collective of the user's own over one of them alone would be wrong without a word.
        axes, sizes = (f"{axis}_group", f"{axis}_in_group"), (num_replicas // size, size)
    if clash := [name for name in axes if name in model]:
        raise StrategyError(f"`mesh` has an axis {clash[0]!r}, a name that `within` uses itself. Give it another name.")
    devices = _by_replica(strategy.devices, math.prod(model.values()))
    grid = np.array(devices).reshape(*sizes, *model.values())
    return dataclasses.replace(
        strategy,
        devices=devices,
        mesh=Mesh(grid, (*axes, *model), axis_types=(AxisType.Auto,) * grid.ndim),
        axes=axes,
        operations=with_parts(strategy.operations),
        parts=Parts(
            of=options["of"],
            memory="device",
            axes=axes[-1:] if size > 1 else (),
            whole_below=whole_below,
            most_whole=most_whole,
            rules=rules,
        ),
    )


def _model_axes(mesh: Any, axis: str, num_devices: int) -> dict[str, int]:
    """Checks the sizes of a mesh's axes, and returns those inside a replica."""
    if mesh is None:
        return {}
    example = f'{{"{axis}": -1, "model": 4}}'
    mesh = dict(mesh.shape) if isinstance(mesh, Mesh) else mesh
    if not isinstance(mesh, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in mesh):
        raise StrategyError(f"`mesh` is {mesh!r}; it must be the sizes of the mesh's axes by name, such as {example}.")
    sizes = {name: checks.as_int(size, least=-1) for name, size in mesh.items()}
    wrong = [name for name, size in sizes.items() if not size]
    if wrong or list(sizes.values()).count(-1) > 1:
        raise StrategyError(f"`mesh` is {dict(mesh)!r}; sizes are 1 or more, and one may be -1: what is left.")
    if axis not in sizes:
        raise StrategyError(
            f"`mesh` has no axis {axis!r}, the axis of the replicas: its axes are {', '.join(sizes)}. Write {example}, "
            "or name the replicas' axis by `axis`."
        )
    known = math.prod(size for size in sizes.values() if size is not None and size > 0)
    sizes = {name: num_devices // known if size == -1 else size for name, size in sizes.items()}
    if math.prod(size or 0 for size in sizes.values()) != num_devices:
        raise StrategyError(
            f"`mesh` is {dict(mesh)!r}, and its sizes must multiply to the number of devices, {num_devices}."
        )
    return {name: size for name, size in sizes.items() if name != axis and size is not None}


def _rules(rules: Any, model: Mapping[str, int], axis: str) -> tuple[Rule, ...]:
    """Checks the rules of a state."""
    example = '[("mlp/up/kernel", (None, "model"))]'
    given = list(rules) if isinstance(rules, Sequence) and not isinstance(rules, str) else None
    if given is None or not all(isinstance(rule, Sequence) and len(rule) == 2 for rule in given):
        raise StrategyError(f"`rules` is {rules!r}; it must be pairs of a pattern and axes, such as {example}.")
    found = []
    for pattern, axes in given:
        is_list = isinstance(axes, list | tuple | PartitionSpec)
        entries = [tuple(x) if isinstance(x, list) else x for x in axes] if is_list else None
        if entries is None or not isinstance(pattern, str):
            raise StrategyError(f"the rule {(pattern, axes)!r} is not a pair of a pattern and axes, such as {example}.")
        rule = Rule(pattern, tuple(entries))
        try:
            rule.matches("")
        except re.error as exc:
            raise StrategyError(f"the pattern {pattern!r} of a rule is not a regular expression: {exc}.") from None
        groups = [x if isinstance(x, tuple) else (x,) for x in entries if x is not None]
        if not all(isinstance(name, str) for group in groups for name in group):
            raise StrategyError(
                f"the rule {(pattern, axes)!r} has an entry that is neither None nor a name, nor a tuple of names of mesh axes."
            )
        names = axes_of(entries)
        unknown = [name for name in names if name not in model]
        if unknown or len(names) != len(set(names)) or not names:
            of_replicas = f" (over {axis!r} the state is cut anyway: see `shard`)" if axis in unknown else ""
            raise StrategyError(
                f"the rule {(pattern, axes)!r} names {', '.join(map(repr, names)) or 'no axis'}{of_replicas}; it must name one "
                f"or more of the mesh's axes inside a replica, each once: {', '.join(model) or 'it has none, see `mesh`'}."
            )
        found.append(rule)
    return tuple(found)


def _by_replica(devices: Sequence[Any], size: int) -> tuple[Any, ...]:
    """Orders devices so that those of each replica are in one process."""
    if size == 1:
        return tuple(devices)
    ordered = tuple(sorted(devices, key=lambda device: device.process_index))
    for i in range(0, len(ordered), size):
        processes = sorted({device.process_index for device in ordered[i : i + size]})
        if len(processes) > 1:
            raise StrategyError(
                f"a replica of {size} devices would span the processes {', '.join(map(str, processes))}, and each reads "
                "the rows of its own replicas. Take a number of devices that divides those of a process."
            )
    return ordered


def _size_of_group(within: Any, num_replicas: int) -> int:
    """Checks how many replicas hold one state together; None: all of them."""
    size = num_replicas if within is None else checks.as_int(within, least=1)
    if size is None or num_replicas % size:
        divisors = [n for n in range(1, num_replicas + 1) if num_replicas % n == 0]
        raise StrategyError(
            f"`within` is {within!r}; it must divide the number of replicas, {num_replicas}: one of "
            f"{', '.join(map(str, divisors))}."
        )
    return size
