"""One device, named explicitly."""

from __future__ import annotations

from typing import Any

from jdist.core.strategy import Strategy
from jdist.reduction import psum
from jdist.strategies.devices import find_device, find_devices
from jdist.strategies.local import strategy_over
from jdist.support.tracebacks import without_own_frames


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
        DeviceError: there is no such device.
        StrategyError: `axis` is not allowed.
    """
    chosen = find_devices(None)[0] if device is None else find_device(device)
    return strategy_over((chosen,), name="one_device", axis=axis, transform="shard_map", reduction=psum())
