"""Operations and mesh of the strategies whose processes all run the same program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
from jax.sharding import AxisType, Mesh

from jdist.core.operations import Operations, Parts, Shard
from jdist.core.replica_mesh import Device, Transform
from jdist.core.show import report
from jdist.core.strategy import Strategy
from jdist.errors import StrategyError
from jdist.reduction import Reduction
from jdist.step import feed, placement
from jdist.step.mesh_step import DistributedStep
from jdist.step.run_on_replicas import run
from jdist.strategies.shard_options import spread_state
from jdist.support import checks


def describe(strategy: Strategy) -> str:
    """Describes the replicas, their devices and processes, and how a step becomes one over the mesh."""
    if strategy.mesh is None:
        return "the step runs as it is, on the device that JAX chooses"
    devices, cluster = strategy.devices, strategy.cluster
    kinds = sorted({d.device_kind for d in devices})
    ids = [d.id for d in devices]
    shown = str(ids) if len(ids) <= 8 else f"[{ids[0]}, {ids[1]}, ..., {ids[-1]}]"
    axes = " x ".join(f"{axis}={size}" for axis, size in strategy.mesh.shape.items())
    replicas = "1 replica" if strategy.num_replicas == 1 else f"{strategy.num_replicas} replicas"
    if strategy.model_axes:
        replicas += f" of {len(devices) // strategy.num_replicas} devices each"
    if cluster.num_processes > 1:
        replicas += f" in {cluster.num_processes} processes, of which this is number {cluster.process_index},"
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
            "device. Give it sizes whose product is that number, or name as many `devices`."
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
    return strategy if shard is None else spread_state(strategy, shard)


def check_axis(axis: str) -> None:
    """Raises StrategyError for what is no name of a mesh axis."""
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
