"""What `jdist.parameter_server` was asked for, checked before there is any server."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from typing import Any, Literal, get_args

from jdist.cluster.spec import ClusterSpec
from jdist.errors import StrategyError
from jdist.ps.coordinator.options import PsOptions
from jdist.ps.coordinator.servers import check_place, cluster_of_environment
from jdist.ps.program.partition import Partitioner, Placement, min_size
from jdist.ps.program.wire_dtype import Wire
from jdist.ps.protocol.shard import OnStale, Rules
from jdist.ps.protocol.times import Times
from jdist.ps.serve import IS_SERVER
from jdist.strategies.local import check_axis
from jdist.strategies.on_worker import strategy_of_worker
from jdist.support.suggest import did_you_mean

Mode = Literal["async", "sync"]


def settled(
    *,
    cluster: ClusterSpec | None,
    local_workers: int | None,
    local_ps: int | None,
    devices_per_worker: int | None,
    start_timeout_s: float,
    partitioner: Partitioner | None,
    placement: Placement,
    mode: Mode,
    backup_workers: int,
    max_staleness: int | None,
    on_stale: OnStale,
    wire: Wire,
    ps_replicas: int,
    times: Times | None,
    axis: str,
    **_: bool,
) -> tuple[ClusterSpec | None, PsOptions | None]:
    """Checks the arguments of `jdist.parameter_server`, which says what they are; looks for no server.

    Returns:
        The cluster, None for processes of this machine; and how it works, None in the cluster's evaluator.

    Raises:
        StrategyError: an argument is not allowed, the cluster lacks workers or servers, or this process is one of them.
        ClusterConfigError: the environment is not right.
    """
    if os.environ.get(IS_SERVER):
        raise StrategyError(
            "this process is a worker, which has imported the program for a dataset function: put what is not to run in it "
            'under `if __name__ == "__main__":`.'
        )
    local_numbers = {"local_workers": local_workers, "local_ps": local_ps, "devices_per_worker": devices_per_worker}
    for name, number in local_numbers.items():
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise StrategyError(f"`{name}` is {number!r}; it must be a whole number of at least 1.")
    is_time = isinstance(start_timeout_s, int | float) and not isinstance(start_timeout_s, bool)
    if not is_time or not 0 <= start_timeout_s < math.inf:
        raise StrategyError(f"`start_timeout_s` is {start_timeout_s!r}; it must be a number of seconds, 0 or more.")
    check_axis(axis)
    _check_spread(partitioner, placement, wire)
    if ps_replicas not in (1, 2) or isinstance(ps_replicas, bool):
        raise StrategyError(f"`ps_replicas` is {ps_replicas!r}; it must be 1, or 2 for a backup of each shard.")
    local = any(number is not None for number in local_numbers.values())
    if cluster is not None and local:
        raise StrategyError(
            "both `cluster` and processes of this machine are given; leave out `local_workers`, `local_ps` and "
            "`devices_per_worker`."
        )
    if cluster is not None and not isinstance(cluster, ClusterSpec):
        raise StrategyError(
            f"`cluster` is a {type(cluster).__name__}; pass a `jdist.cluster.ClusterSpec`, or leave it out."
        )
    spec = cluster if cluster is not None or local else cluster_of_environment()
    if spec is not None and spec.task_type == "evaluator":
        return spec, None
    if spec is not None:
        check_place(spec)
    num_ps = len(spec.jobs["ps"]) if spec is not None else local_ps or ps_replicas
    if num_ps < ps_replicas:
        raise StrategyError(
            "`ps_replicas` is 2 and there is 1 parameter server; a shard's backup is on another one. "
            + ("Give `local_ps=2` or more." if spec is None else "Add one to the cluster, or leave `ps_replicas` at 1.")
        )
    if not isinstance(times, Times | None):
        raise StrategyError(f"`times` is a {type(times).__name__}; pass a `jdist.ps.Times`, or leave it out.")
    workers = (local_workers or 2) if spec is None else len(spec.jobs["worker"])
    _check_mode(mode, backup_workers, max_staleness, workers)
    if mode == "sync" and spec is None and (devices_per_worker or 1) > 1:
        raise StrategyError(
            f"`devices_per_worker` is {devices_per_worker}, and synchronous mode has one gradient of one device for each "
            "worker. Give `local_workers` as many more, or use `jdist.mirrored()`."
        )
    _check_staleness(max_staleness, on_stale)
    # Workers do not push what is refused.
    rules = Rules(max_staleness=max_staleness, on_stale=on_stale, non_finite="skip")
    is_sync = mode == "sync"
    if is_sync:
        rules = dataclasses.replace(rules, max_staleness=0)
    options = PsOptions(
        on_worker=functools.partial(strategy_of_worker, axis=axis),
        partitioner=partitioner or min_size(),
        placement=placement,
        rules=rules,
        times=times or Times(),
        wire=wire,
        is_sync=is_sync,
        gradients_per_update=workers - backup_workers if is_sync else 1,
        backup_workers=backup_workers,
        replicas=ps_replicas,
    )
    return spec, options


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


def _check_staleness(max_staleness: Any, on_stale: Any) -> None:
    is_count = isinstance(max_staleness, int) and not isinstance(max_staleness, bool) and max_staleness >= 0
    if max_staleness is not None and not is_count:
        raise StrategyError(
            f"`max_staleness` is {max_staleness!r}; it must be a whole number of updates, 0 or more, or None for any number."
        )
    if on_stale not in get_args(OnStale):
        raise StrategyError(
            f"`on_stale` is {on_stale!r}; allowed are 'refuse' and 'down_weight'.{did_you_mean(on_stale, get_args(OnStale))}"
        )


def _check_mode(mode: Any, backup_workers: Any, max_staleness: int | None, workers: int) -> None:
    if mode not in get_args(Mode):
        raise StrategyError(f"`mode` is {mode!r}; allowed are 'async' and 'sync'.{did_you_mean(mode, get_args(Mode))}")
    if not isinstance(backup_workers, int) or isinstance(backup_workers, bool) or backup_workers < 0:
        raise StrategyError(f"`backup_workers` is {backup_workers!r}; it must be a whole number, 0 or more.")
    if mode == "async" and backup_workers:
        raise StrategyError(
            '`backup_workers` is for `mode="sync"`: in asynchronous mode nobody waits for the last worker.'
        )
    if backup_workers >= workers:
        raise StrategyError(
            f"`backup_workers` is {backup_workers}, and there are {workers} workers; at least one must be left."
        )
    if mode == "sync" and max_staleness is not None:
        raise StrategyError('`max_staleness` is for asynchronous mode: with `mode="sync"` no gradient is stale.')
