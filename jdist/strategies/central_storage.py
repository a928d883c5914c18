"""One copy of the state, in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jdist.core.layout import Layout
from jdist.core.operations import Parts
from jdist.core.strategy import Strategy
from jdist.reduction import psum
from jdist.sharded_state.operations import with_parts
from jdist.strategies.devices import devices_or_topology
from jdist.strategies.local import LOCAL, strategy_over
from jdist.support.tracebacks import without_own_frames

CENTRAL = with_parts(LOCAL)


@without_own_frames
def central_storage(
    devices: Sequence[Any] | None = None, *, axis: str = "replica", topology: str | None = None
) -> Strategy:
    """Keeps one copy of the state in host memory, and computes gradients on every device.

    Each replica's host holds a part of every parameter and of the optimiser's state. A step copies the parts of what its
    gradients read to the devices and gathers them there; each gradient is summed on the devices, part by part, and every
    host updates its own part. Devices hold parameters and gradients only while they compute with them, and nothing of the
    optimiser's state: models fit whose state does not, for the price of copying between host and device in every step.

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
