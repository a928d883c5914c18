"""The arguments of `jdist.parameter_server`, checked before there is any server."""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

import jax
from jax.sharding import AbstractMesh, AxisType

from jdist.cluster.spec import ClusterSpec
from jdist.core.strategy import Strategy
from jdist.errors import StrategyError
from jdist.ps.coordinator.servers import check_place, cluster_of_environment
from jdist.ps.coordinator.session import PsOptions
from jdist.ps.program.partition import Partitioner, Placement, min_size
from jdist.ps.program.wire_dtype import Wire
from jdist.ps.protocol.shard import OnStale, Rules
from jdist.ps.protocol.times import Times
from jdist.ps.serve import IS_SERVER
from jdist.reduction import psum
from jdist.strategies.local import LOCAL, check_axis
from jdist.strategies.one_device import one_device
from jdist.support.checks import as_bool, as_int, as_real
from jdist.support.suggest import did_you_mean

Mode = Literal["async", "sync"]
_LOCAL = ("local_workers", "local_ps", "devices_per_worker")


class PsKeywords(TypedDict, total=False):
    """The arguments of `jdist.parameter_server`: the fields of `PsArguments`, as an editor and a type checker see them."""

    cluster: ClusterSpec | None
    local_workers: int | None
    local_ps: int | None
    devices_per_worker: int | None
    insecure: bool
    keep_servers: bool
    start_timeout_s: float
    partitioner: Partitioner | None
    placement: Placement
    mode: Mode
    backup_workers: int
    max_staleness: int | None
    on_stale: OnStale
    wire: Wire
    ps_replicas: int
    times: Times | None
    axis: str


@dataclass(frozen=True, kw_only=True)
class PsArguments:
    """The arguments of `jdist.parameter_server`, each checked by itself."""

    cluster: ClusterSpec | None = None
    local_workers: int | None = None
    local_ps: int | None = None
    devices_per_worker: int | None = None
    insecure: bool = False
    keep_servers: bool = False
    start_timeout_s: float = 300.0
    partitioner: Partitioner | None = None
    placement: Placement = "round_robin"
    mode: Mode = "async"
    backup_workers: int = 0
    max_staleness: int | None = None
    on_stale: OnStale = "refuse"
    wire: Wire = "float32"
    ps_replicas: int = 1
    times: Times | None = None
    axis: str = "replica"

    def __post_init__(self) -> None:
        if os.environ.get(IS_SERVER):
            raise StrategyError(
                "this process is a worker, which has imported the program for a dataset function: put what is not to run in it "
                'under `if __name__ == "__main__":`.'
            )
        for name in _LOCAL:
            number = getattr(self, name)
            if number is not None and not self._take_int(name, least=1):
                raise StrategyError(f"`{name}` is {number!r}; it must be a whole number of at least 1.")
        seconds = as_real(self.start_timeout_s)
        if seconds is None or not 0 <= seconds < math.inf:
            raise StrategyError(
                f"`start_timeout_s` is {self.start_timeout_s!r}; it must be a number of seconds, 0 or more."
            )
        for name in ("insecure", "keep_servers"):
            if as_bool(getattr(self, name)) is None:
                raise StrategyError(f"`{name}` is {getattr(self, name)!r:.80}; it must be True or False.")
        check_axis(self.axis)
        _check_spread(self.partitioner, self.placement, self.wire)
        if as_int(self.ps_replicas) not in (1, 2):
            raise StrategyError(
                f"`ps_replicas` is {self.ps_replicas!r}; it must be 1, or 2 for a backup of each shard."
            )
        if self.cluster is not None and self.is_local:
            raise StrategyError(
                "both `cluster` and processes of this machine are given; leave out `local_workers`, `local_ps` and "
                "`devices_per_worker`."
            )
        if self.cluster is not None and not isinstance(self.cluster, ClusterSpec):
            raise StrategyError(
                f"`cluster` is a {type(self.cluster).__name__}; pass a `jdist.cluster.ClusterSpec`, or leave it out."
            )
        if not isinstance(self.times, Times | None):
            raise StrategyError(f"`times` is a {type(self.times).__name__}; pass a `jdist.ps.Times`, or leave it out.")
        _check_choice("mode", self.mode, get_args(Mode))
        if not self._take_int("backup_workers", least=0):
            raise StrategyError(f"`backup_workers` is {self.backup_workers!r}; it must be a whole number, 0 or more.")
        if self.max_staleness is not None and not self._take_int("max_staleness", least=0):
            raise StrategyError(
                f"`max_staleness` is {self.max_staleness!r}; it must be a whole number of updates, 0 or more, or None for any "
                "number."
            )
        _check_choice("on_stale", self.on_stale, get_args(OnStale))
        if self.mode == "async" and self.backup_workers:
            raise StrategyError(
                '`backup_workers` is for `mode="sync"`: in asynchronous mode nobody waits for the last worker.'
            )
        if self.mode == "sync" and self.max_staleness is not None:
            raise StrategyError('`max_staleness` is for asynchronous mode: with `mode="sync"` no gradient is stale.')

    def _take_int(self, name: str, *, least: int) -> bool:
        """Makes an argument a Python int, as NumPy's cannot travel; whether it is a whole number of at least `least`."""
        number = as_int(getattr(self, name), least=least)
        object.__setattr__(self, name, getattr(self, name) if number is None else number)
        return number is not None

    @property
    def is_local(self) -> bool:
        """Whether processes of this machine are asked for."""
        return any(getattr(self, name) is not None for name in _LOCAL)

    def resolve(self) -> tuple[ClusterSpec | None, PsOptions | None]:
        """Checks the arguments against the cluster; looks for no server."""
        # Returns no cluster for processes of this machine, and no options in the cluster's
        # evaluator.
        spec = self.cluster if self.cluster is not None or self.is_local else cluster_of_environment()
        if spec is not None and spec.task_type == "evaluator":
            return spec, None
        if spec is not None:
            check_place(spec)
        num_ps = len(spec.jobs["ps"]) if spec is not None else self.local_ps or self.ps_replicas
        if num_ps < self.ps_replicas:
            raise StrategyError(
                "`ps_replicas` is 2 and there is 1 parameter server; a shard's backup is on another one. "
                + (
                    "Give `local_ps=2` or more."
                    if spec is None
                    else "Add one to the cluster, or leave `ps_replicas` at 1."
                )
            )
        workers = (self.local_workers or 2) if spec is None else len(spec.jobs["worker"])
        if self.backup_workers >= workers:
            raise StrategyError(
                f"`backup_workers` is {self.backup_workers}, and there are {workers} workers; at least one must be left."
            )
        is_sync = self.mode == "sync"
        if is_sync and spec is None and (self.devices_per_worker or 1) > 1:
            raise StrategyError(
                f"`devices_per_worker` is {self.devices_per_worker}, and synchronous mode has one gradient of one device for "
                "each worker. Give `local_workers` as many more, or use `jdist.mirrored()`."
            )
        # Workers do not push what is refused.
        rules = Rules(max_staleness=0 if is_sync else self.max_staleness, on_stale=self.on_stale, non_finite="skip")
        return spec, PsOptions(
            on_worker=functools.partial(strategy_of_worker, axis=self.axis),
            partitioner=self.partitioner or min_size(),
            placement=self.placement,
            rules=rules,
            times=self.times or Times(),
            wire=self.wire,
            is_sync=is_sync,
            gradients_per_update=workers - self.backup_workers if is_sync else 1,
            backup_workers=self.backup_workers,
            replicas=int(self.ps_replicas),
        )


def _check_spread(partitioner: Any, placement: Any, wire: Any) -> None:
    if wire not in get_args(Wire):
        raise StrategyError(f"`wire` is {wire!r}; allowed are 'float32' and 'bf16'.")
    if placement not in get_args(Placement):
        raise StrategyError(
            f"`placement` is {placement!r}; allowed are 'round_robin' and 'bytes'."
            f"{did_you_mean(placement, get_args(Placement))}"
        )
    if partitioner is not None and not callable(partitioner):
        raise StrategyError(
            f"`partitioner` is {partitioner!r}; allowed are `jdist.ps.fixed_shards(n)`, `jdist.ps.min_size(bytes)`, "
            "`jdist.ps.max_size(bytes)`, and None for `min_size(256 << 10)`."
        )


def _check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        known = " and ".join(map(repr, allowed))
        raise StrategyError(f"`{name}` is {value!r}; allowed are {known}.{did_you_mean(value, allowed)}")


def strategy_of_worker(num_devices: int, *, axis: str) -> Strategy:
    """Makes a strategy, mirrored over a worker's devices, that only traces its part of a step."""
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
