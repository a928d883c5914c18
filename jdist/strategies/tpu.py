"""A copy of the state on every TPU device, on a mesh in the order of the interconnect."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from jdist.cluster import runtime
from jdist.cluster.communication import CommunicationOptions
from jdist.cluster.jax_processes import check_devices
from jdist.cluster.resolvers.resolve import resolve
from jdist.core.operations import Shard
from jdist.core.replica_mesh import Transform
from jdist.core.strategy import Strategy
from jdist.errors import DeviceError, StrategyError
from jdist.reduction import make_reduction
from jdist.reduction.by_name import AllReduce
from jdist.strategies.local import check_reduction, check_transform, strategy_over
from jdist.strategies.topology import attached_tpu_devices, parse_topology, topology_devices
from jdist.support.tracebacks import without_own_frames


@without_own_frames
def tpu(
    topology: str | None = None,
    name: str | None = None,
    *,
    transform: Transform = "shard_map",
    all_reduce: AllReduce = "psum",
    axis: str = "replica",
    shard: Shard | Mapping[str, Any] | None = None,
) -> Strategy:
    """Runs a step on every TPU device: as `mirrored`, on a mesh in the order of the interconnect.

    Neighbours on the mesh are neighbours in the torus; where there are several slices, each lies on the mesh in
    one piece, so that only a reduction between slices crosses the data-centre network. Where the environment describes
    several hosts (`jdist.cluster.resolve`), their processes come together first, as under `multi_worker`. Calling it
    again gives the same devices: JAX starts a TPU once in a process.

    Args:
        topology: None for the TPU of this machine (a Cloud TPU VM, Colab). A name such as "v5p:8x8x8" or
            "v5p:8x8x8,slices=2" or "v5e-16" for one that is not here: a step can then be lowered and compiled, not run.
        name: the TPU's name, as `TPUClusterResolver(tpu=name)` takes it. JAX drives the TPU of the machine it runs
            on, so the name is only compared with TPU_NAME; None, "" and "local" fit any.
        transform: "shard_map" or "jit"; as in `mirrored`. "pmap" too, without `topology`.
        all_reduce: how replicas sum their gradients, as in `mirrored`.
        axis: name of the mesh axis, for steps that call `lax.pmean(x, axis_name=...)` themselves.
        shard: keeps the state, or the optimiser's, in parts, as in `mirrored`.

    Returns:
        A Strategy with one replica a device.

    Raises:
        DeviceError: there is no TPU here, no such topology, or libtpu is missing.
        ClusterError: there are several hosts, and not all of their processes came.
        ClusterConfigError: the environment does not describe a cluster that this process has a place in.
        StrategyError: `name`, `transform`, `all_reduce`, `axis` or `shard` is not allowed.

    Example:
        >>> import jdist
        >>> jdist.tpu(topology="v5e:2x4").num_replicas
        8
    """
    check_transform(transform, topology)
    _check_name(name)
    reduction = make_reduction(all_reduce)
    check_reduction(reduction, transform)
    if topology is not None:
        if parse_topology(topology).platform != "tpu":
            raise DeviceError(
                f"`topology` is {topology!r}, which is no TPU; write jdist.mirrored(topology={topology!r})."
            )
        return strategy_over(
            topology_devices(topology),
            name="tpu",
            axis=axis,
            transform=transform,
            reduction=reduction,
            topology=topology,
            shard=shard,
        )
    spec = resolve(os.environ)
    cluster = runtime.start(spec, **CommunicationOptions().timeouts) if spec.num_processes > 1 else runtime.alone()
    devices = attached_tpu_devices(spec.num_processes)
    check_devices(devices)
    strategy = strategy_over(devices, name="tpu", axis=axis, transform=transform, reduction=reduction, shard=shard)
    return dataclasses.replace(strategy, cluster=cluster)


def _check_name(name: str | None) -> None:
    here = os.environ.get("TPU_NAME", "")
    if name in (None, "", "local", here):
        return
    remedy = f"TPU_NAME is {here!r} here" if here else "TPU_NAME is not set here"
    raise StrategyError(
        f"`name` is {name!r}, but JAX drives the TPU of the machine it runs on, and {remedy}. Start the program on the "
        f"TPU VM {name!r} itself, and leave `name` out."
    )
