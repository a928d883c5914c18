"""A copy of the state on every device of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from jdist.errors import StrategyError
from jdist.reduction import Reduction, make_reduction
from jdist.strategies.devices import find_devices
from jdist.strategies.local import strategy_over
from jdist.strategy import Strategy, Transform


def mirrored(
    devices: Sequence[Any] | None = None,
    *,
    transform: Transform = "shard_map",
    all_reduce: str | Reduction = "psum",
    axis: str = "replica",
) -> Strategy:
    """Runs a step on every device of this machine: each holds the whole state and computes on its slice of the batch.

    Gradients are all-reduced, so all copies make the same update and stay equal.

    Args:
        devices: jax devices or names such as "gpu:0"; None: every device of the default platform.
        transform: "shard_map" and "pmap" run the step once for each replica; "jit" is the global view, in which the
            step sees the whole batch and the compiler spreads it.
        all_reduce: how replicas sum their gradients: a name, or a `jdist.reduction.Reduction`.
        axis: name of the mesh axis, for steps that call `lax.pmean(x, axis_name=...)` themselves.

    Returns:
        A Strategy with one replica a device.

    Raises:
        DeviceError: a device is not there.
        StrategyError: `transform`, `all_reduce` or `axis` is not allowed.
    """
    if transform not in get_args(Transform):
        raise StrategyError(f"`transform` is {transform!r}; allowed are {', '.join(map(repr, get_args(Transform)))}.")
    return strategy_over(
        find_devices(devices),
        name="mirrored",
        axis=axis,
        transform=transform,
        reduction=make_reduction(all_reduce),
    )
