"""The devices of a strategy, and the replicas that are spread over them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist.errors import DeviceError
from jdist.reduction import Reduction

Device = Any  # jax.Device, which type checkers take for a variable
Transform = Literal["shard_map", "pmap", "jit"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaMesh:
    """A mesh with axes of replicas, and axes inside each; `Strategy` describes the fields."""

    name: str
    devices: tuple[Device, ...] = ()
    mesh: Mesh | None = None
    axes: tuple[str, ...] = ()
    transform: Transform | None = None
    reduction: Reduction
    topology: str | None = None

    @functools.cached_property
    def num_replicas(self) -> int:
        """The number of copies of the model that compute at the same time."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The mesh axes inside a replica; empty where each replica is one device."""
        return () if self.mesh is None else tuple(axis for axis in self.mesh.axis_names if axis not in self.axes)

    @property
    def first_devices(self) -> tuple[Device, ...]:
        """The first device of each replica."""
        return self.devices[:: len(self.devices) // self.num_replicas or 1]

    @functools.cached_property
    def local_replicas(self) -> tuple[int, ...]:
        """The numbers of the replicas that this process drives."""
        local = range(self.num_replicas)
        if self.batch_sharding is not None and not self.batch_sharding.is_fully_addressable:
            here = self.batch_sharding.addressable_devices
            local = (i for i in local if self.first_devices[i] in here)
        return tuple(local)

    @property
    def keeps_residuals(self) -> bool:
        """Returns whether the all-reduce keeps something of each gradient: steps return a `jdist.StepState` with residuals."""
        return self.num_replicas > 1 and not self.reduction.exact

    @property
    def is_global_view(self) -> bool:
        """Returns whether a step sees the whole batch, and the compiler spreads it."""
        return self.transform == "jit"

    @property
    def bound_axes(self) -> tuple[str, ...]:
        """The mesh axes over which replicas exchange in a step; empty with one replica and in the global view."""
        return self.axes if self.num_replicas > 1 and not self.is_global_view else ()

    @property
    def replicated_sharding(self) -> NamedSharding | None:
        """The sharding of what every replica holds whole; None under default."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch_sharding(self) -> NamedSharding | None:
        """The sharding of a global batch, rows spread over the replicas; None under default."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec(self.axes))

    def need_devices(self, what: str) -> None:
        """Raises DeviceError for what needs devices, if the strategy was built for some that are not here."""
        if self.topology is not None:
            raise DeviceError(
                f"these devices are not here: the strategy was built for the topology {self.topology!r}, to compile "
                f"for, so `{what}` cannot run. `step.lower(state, batch).compile()` with `jax.ShapeDtypeStruct`s "
                "works, and so does `jdist plan`. Where the devices are, leave `topology` out."
            )
