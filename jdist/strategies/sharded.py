"""A part of the state on every device, under the same step as a copy on every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jdist.core.operations import Shard
from jdist.core.strategy import Strategy
from jdist.reduction import psum
from jdist.strategies.devices import devices_or_topology
from jdist.strategies.local import strategy_over
from jdist.support.tracebacks import without_own_frames


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
