"""A copy of the state on every device of one machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jdist.core.operations import Shard
from jdist.core.replica_mesh import Transform
from jdist.core.strategy import Strategy
from jdist.reduction import make_reduction
from jdist.reduction.by_name import AllReduce
from jdist.strategies.devices import devices_or_topology
from jdist.strategies.local import check_reduction, check_transform, strategy_over
from jdist.support.tensorflow_names import without_tensorflow_keywords
from jdist.support.tracebacks import without_own_frames


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
