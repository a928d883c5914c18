"""A part of the state on every device of one machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jdist.core.operations import Parts
from jdist.core.strategy import Strategy
from jdist.reduction import psum
from jdist.sharded_state import operations as in_parts
from jdist.step import placement
from jdist.strategies.devices import devices_or_topology
from jdist.strategies.local import LOCAL, strategy_over

SHARDED = dataclasses.replace(
    LOCAL,
    init=in_parts.init,
    fetch=in_parts.fetch,
    check=placement.check_in_parts,
    run=in_parts.run,
    distribute=in_parts.distribute,
)


def sharded(
    devices: Sequence[Any] | None = None,
    *,
    shard: Literal["state", "optimizer"] = "state",
    whole_below: int = 1024,
    most_whole: float = 0.02,
    axis: str = "replica",
    topology: str | None = None,
) -> Strategy:
    """Spreads the state over the devices of this machine, a part each, under the same step as `mirrored`.
    """
    used = devices_or_topology(devices, topology)
    many = len(used) > 1
    parts = Parts(of=shard, memory="device", axes=(axis,), whole_below=whole_below, most_whole=most_whole)
    return strategy_over(
        used,
        name="sharded",
        axis=axis,
        transform="shard_map",
        reduction=psum(),
        operations=SHARDED if many else LOCAL,
        topology=topology,
        parts=parts if many else None,
    )
