"""How a worker runs its part of a step, as the coordinator sees it: over devices that are not the coordinator's."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, AxisType

from jdist.core.strategy import Strategy
from jdist.reduction import psum
from jdist.strategies.local import LOCAL
from jdist.strategies.one_device import one_device


def strategy_of_worker(num_devices: int, *, axis: str) -> Strategy:
    """A strategy to trace a worker's part of a step under; nothing can be run under it here.

    Args:
        num_devices: the worker's devices, over which the step is mirrored.
        axis: name of their mesh axis.
    """
    if num_devices == 1:
        return one_device(jax.devices()[0], axis=axis)
    return Strategy(
        name="worker",
        devices=(jax.devices()[0],) * num_devices,  # only their number counts
        mesh=AbstractMesh((num_devices,), (axis,), axis_types=(AxisType.Auto,)),  # type: ignore[arg-type]  # it stands for one
        axes=(axis,),
        transform="shard_map",
        reduction=psum(),
        operations=LOCAL,
    )
