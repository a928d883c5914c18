"""The strategies that are a choice of devices and options for `strategy_over`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jdist.cluster import runtime
from jdist.cluster.communication import CommunicationOptions
from jdist.cluster.jax_processes import check_devices
from jdist.cluster.resolvers.resolve import resolve
from jdist.core.layout import Layout
from jdist.core.operations import Parts, Shard
from jdist.core.replica_mesh import Transform
from jdist.core.strategy import Strategy
from jdist.errors import DeviceError, StrategyError
from jdist.reduction import make_reduction, psum
from jdist.reduction.by_name import AllReduce
from jdist.sharded_state.operations import with_parts
from jdist.strategies.devices import devices_or_topology, find_device, find_devices
from jdist.strategies.local import LOCAL, check_reduction, check_transform, strategy_over
from jdist.strategies.topology import attached_tpu_devices, parse_topology, topology_devices
from jdist.support.tensorflow_names import without_tensorflow_keywords
from jdist.support.tracebacks import without_own_frames

CENTRAL = with_parts(LOCAL)


@without_own_frames
def one_device(device: Any = None, *, axis: str = "replica") -> Strategy:
    """Runs a step on one device: everything is placed there explicitly, and batches are prefetched to it.

    It binds a mesh of size 1 with the axis names of the larger strategies, so a step that uses collectives of its own
    can be tried on one device first.

    Args:
        device: a jax device or a name such as "gpu:0" or "cpu:3"; None: the first one.
        axis: name of the mesh axis, for steps that call `lax.pmean(x, axis_name=...)` themselves.

    Returns:
        A Strategy with one replica.

    Raises:
        DeviceError: the device does not exist.
        StrategyError: `axis` is not allowed.
    """
    chosen = find_devices(None)[0] if device is None else find_device(device)
    return strategy_over((chosen,), name="one_device", axis=axis, transform="shard_map", reduction=psum())


@without_own_frames
@without_tensorflow_keywords
def mirrored(
    devices: Sequence[Any] | None = None,
    *,
    transform: Transform = "shard_map",
    all_reduce: AllReduce = "psum",
    axis: str = "replica",
    topology: str | None = None,
    shard: Shard | Mapping[str, Any] | None = None,
) -> Strategy:
    """Runs a step on every device of this machine: each holds the whole state and computes on its slice of the batch.

    Gradients are all-reduced, so all copies make the same update and stay equal.

    Args:
        devices: jax devices or names such as "gpu:0"; None: every device of the default platform.
        transform: "shard_map" and "pmap" run the step once for each replica; "jit" is the global view, in which the
            step sees the whole batch and the compiler spreads it.
        all_reduce: how replicas sum their gradients: a name, a mapping such as `{"name": "bucketed", "bytes_per_pack":
            4_000_000}`, or a `jdist.reduction.Reduction`.
        axis: name of the mesh axis, for steps that call `lax.pmean(x, axis_name=...)` themselves.
        topology: devices that are not here, "h100:8", "a100-80gb:8" or "v5e:2x4", instead of `devices`: a step can then be
            lowered and compiled, not run.
        shard: "state" or "optimizer": keeps that in parts, as `jdist.sharded` does; or a mapping of its options, such as
            `{"of": "state", "within": 8}`. None: every device holds the whole state.

    Returns:
        A Strategy with one replica a device.

    Raises:
        DeviceError: a device is not there; or no such topology, or its compiler is missing.
        StrategyError: `transform`, `all_reduce` or `axis` is not allowed, or the first two do not go together; or both
            `devices` and `topology` are given.
    """
    check_transform(transform, topology)
    reduction = make_reduction(all_reduce)
    check_reduction(reduction, transform)
    return strategy_over(
        devices_or_topology(devices, topology),
        name="mirrored",
        axis=axis,
        transform=transform,
        reduction=reduction,
        topology=topology,
        shard=shard,
    )


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
        DeviceError: the TPU or libtpu is missing, or the topology does not exist.
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
    cluster = runtime.alone()
    if topology is None:
        spec = resolve(os.environ)
        if spec.num_processes > 1:
            cluster = runtime.start(spec, **CommunicationOptions().timeouts)
        devices = attached_tpu_devices(spec.num_processes)
        check_devices(devices)
    elif parse_topology(topology).platform == "tpu":
        devices = topology_devices(topology)
    else:
        raise DeviceError(f"`topology` is {topology!r}, not a TPU; write jdist.mirrored(topology={topology!r}).")
    strategy = strategy_over(
        devices, name="tpu", axis=axis, transform=transform, reduction=reduction, topology=topology, shard=shard
    )
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


@without_own_frames
def sharded(
    devices: Sequence[Any] | None = None,
    *,
    shard: Shard = "state",
    within: int | None = None,
    whole_below: int = 1024,
    most_whole: float = 0.02,
    mesh: Mapping[str, int] | None = None,
    rules: Sequence[tuple[str, Sequence[Any]]] = (),
    axis: str = "replica",
    topology: str | None = None,
) -> Strategy:
    """Runs a step on every device of this machine: each holds a part of the state and computes on its slice of the batch.

    Each array is cut into as many parts as there are devices. The step is `mirrored`'s: `jdist.value_and_grad` gathers every
    parameter where the loss uses it, of layers in a `lax.scan` one at a time, and again in the backward pass; gradients are
    summed such that each device receives its part, and the optimiser updates parts. A parameter that the step reads elsewhere
    is gathered there.

    Outside of a step, an array in parts stands in the state as a `ShardedLeaf`: `strategy.fetch` gives the array.

    Args:
        devices: jax devices or names such as "gpu:0"; None: every device of the default platform.
        shard: "state": parameters and the optimiser's state are in parts. "optimizer": the latter alone; parameters are whole
            on every device, and gathered once an update.
        within: how many replicas hold one state together; groups of so many hold copies of it. None: all of them; 1: each
            has all of the state, cut by `rules` alone.
        whole_below: arrays of fewer elements stay whole on every device.
        most_whole: the share of a state's bytes that may stay whole; more is an error that names the arrays.
        mesh: sizes of the mesh axes by name, `{"replica": -1, "model": 4}`: a replica is then so many devices, neighbours in
            one process, which share its work as the compiler divides it. One size may be -1, what is left.
        rules: which arrays are divided over the axes inside a replica, as pairs of a pattern and, for each axis of the
            array, the mesh axis or None: `("mlp/up/kernel", (None, "model"))`. The pattern is a regular expression for the end
            of a path, from the name of a node on; it is for the array's moments in the optimiser too. flax's own metadata
            (`nn.with_partitioning`, a `sharding` of nnx) say the same without rules.
        axis: name of the mesh axis of the replicas, for steps that call `lax.pmean(x, axis_name=...)` themselves. With
            `within` there are two, `jdist.replica_axes()`.
        topology: devices that are not here, "h100:8" or "v5p:4x4x4", instead of `devices`: a step can then be lowered and
            compiled, not run.

    Returns:
        A Strategy with one replica a device, or as many devices as `mesh` has inside a replica.

    Raises:
        DeviceError: a device is not there; or no such topology, or its compiler is missing.
        StrategyError: an argument is not allowed.

    Example:
        >>> import jax.numpy as jnp, jdist
        >>> strategy = jdist.sharded()
        >>> state = strategy.init(lambda: {"w": jnp.ones((300, 500))})
        >>> strategy.fetch(state)["w"].shape
        (300, 500)

    Source: ZeRO (Rajbhandari et al. 2020): "state" is its stage 3, "optimizer" its stage 1.
    """
    return strategy_over(
        devices_or_topology(devices, topology),
        name="sharded",
        axis=axis,
        transform="shard_map",
        reduction=psum(),
        topology=topology,
        shard={
            "of": shard,
            "within": within,
            "whole_below": whole_below,
            "most_whole": most_whole,
            "mesh": mesh,
            "rules": rules,
        },
    )


@without_own_frames
def central_storage(
    devices: Sequence[Any] | None = None, *, axis: str = "replica", topology: str | None = None
) -> Strategy:
    """Keeps one copy of the state in host memory, and computes gradients on every device.

    Each replica's host holds a part of every parameter and of the optimiser's state. A step copies the parts of what its
    gradients read to the devices and gathers them there; each gradient is summed on the devices, part by part, and every
    host updates its own part. Devices hold parameters and gradients only while they compute with them, and nothing of the
    optimiser's state: models fit even if their state does not, for the price of copying between host and device in every step.

    Outside of a step, an array in parts stands in the state as a `ShardedLeaf`: `strategy.fetch` gives the array. Scalars and
    PRNG keys stay on the devices, and so does everything with one device.

    Args:
        devices: jax devices or names such as "gpu:0"; None: every device of the default platform.
        axis: name of the mesh axis, for steps that call `lax.pmean(x, axis_name=...)` themselves.
        topology: a TPU that is not here, "v5e:2x4", instead of `devices`: a step can then be lowered and compiled, not run.
            JAX describes GPUs that are not here without their hosts' memory.

    Returns:
        A Strategy with one replica a device.

    Raises:
        DeviceError: a device is not there, or offers no host memory.
        StrategyError: `axis` is not allowed.

    Example:
        >>> import jax.numpy as jnp, jdist
        >>> strategy = jdist.central_storage()
        >>> state = strategy.init(lambda: {"w": jnp.ones((3, 5))})
        >>> strategy.fetch(state)["w"].shape
        (3, 5)
    """
    used = devices_or_topology(devices, topology)
    operations = CENTRAL if len(used) > 1 else LOCAL
    strategy = strategy_over(
        used,
        name="central_storage",
        axis=axis,
        transform="shard_map",
        reduction=psum(),
        operations=operations,
        topology=topology,
        parts=Parts(of="state", memory="host", axes=(axis,)) if len(used) > 1 else None,
    )
    if len(used) > 1:
        Layout.of(strategy)  # refuses devices without host memory
    return strategy
