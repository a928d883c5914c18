"""A copy of the state on every device of every process of a cluster."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import jax

from jdist.cluster import failpoints, runtime
from jdist.cluster.communication import CommunicationOptions
from jdist.cluster.environment import WORLDS
from jdist.cluster.failpoints import Point
from jdist.cluster.jax_processes import check_devices
from jdist.cluster.resolvers.resolve import resolve
from jdist.cluster.spec import ClusterSpec
from jdist.core.operations import Shard
from jdist.core.replica_mesh import Device, Transform
from jdist.core.strategy import Strategy
from jdist.errors import DeviceError, StrategyError
from jdist.reduction import Reduction, bucketed, make_reduction, psum, ring
from jdist.reduction.by_name import AllReduce
from jdist.step import placement
from jdist.strategies import absent_plugins
from jdist.strategies.local import check_reduction, strategy_over
from jdist.strategies.topology import topology_devices
from jdist.support import checks
from jdist.support.tracebacks import without_own_frames

OnLoss = Literal["stop", "continue"]
TRANSFORMS = ("shard_map", "jit")


@without_own_frames
def multi_worker(
    cluster: ClusterSpec | None = None,
    *,
    communication: CommunicationOptions | Mapping[str, Any] | None = None,
    transform: Transform = "shard_map",
    all_reduce: AllReduce | None = None,
    axis: str = "replica",
    topology: str | None = None,
    shard: Shard | Mapping[str, Any] | None = None,
    on_loss: OnLoss = "stop",
) -> Strategy:
    """Runs a step on every device of every process: each device holds the whole state and computes on its slice.

    The same program runs as every process, each with its own place in the cluster. With one process this is `mirrored`.
    It must be called before JAX is used for anything else, and may be called again. While the job runs, the processes
    watch each other: when one is lost, all others end within `communication.timeout_s` and a little, with exit code 75.

    Args:
        cluster: the processes, and which of them this is; None: found in the environment, see `jdist.cluster.resolve`.
        communication: how gradients are all-reduced, and how long a process may be silent; a mapping of its fields from a
            config file.
        transform: "shard_map" runs the step once for each replica; "jit" is the global view, in which the step sees the
            whole batch and the compiler spreads it.
        all_reduce: how replicas sum their gradients, as for `mirrored`; None: as `communication` says. "hierarchical"
            reduces within each process first, then between the processes.
        axis: name of the mesh axis, for steps that call `lax.pmean(x, axis_name=...)` themselves.
        topology: hosts that are not here, such as "h100:4x8" for four with eight GPUs each, instead of `cluster`: a step
            can then be lowered and compiled, not run.
        shard: keeps the state, or the optimiser's, in parts, as in `mirrored`.
        on_loss: what the others do when a process is lost: "stop", or "continue" without it under `jdist launch --on-loss
            continue`. Then the strategy's devices change with the processes, and `jdist.fit` goes on by itself.

    Returns:
        A Strategy with one replica a device, those of process 0 first.

    Raises:
        ClusterConfigError: the environment does not describe a cluster that this process has a place in.
        ClusterTimeoutError: not all processes came in time.
        ClusterError: JAX was used already.
        StrategyError: an option is not allowed.

    Example:
        >>> import jdist
        >>> jdist.multi_worker().cluster.num_processes
        1
    """
    _check_transform(transform)
    checks.choice("on_loss", on_loss, get_args(OnLoss), StrategyError)
    options = _communication(communication)
    made = functools.partial(
        multi_worker_on, communication=options, transform=transform, all_reduce=all_reduce, axis=axis, shard=shard
    )
    if topology is not None:
        if cluster is not None:
            raise StrategyError("`cluster` and `topology` both say where the step runs; leave one of them out.")
        return made(topology_devices(topology), topology=topology)
    absent_plugins.pass_over_plugin()
    spec = resolve(os.environ) if cluster is None else cluster
    if not isinstance(spec, ClusterSpec):
        raise StrategyError(
            f"`cluster` is a {type(spec).__name__}; pass a `jdist.cluster.ClusterSpec`, or leave it out."
        )
    if spec.task_type == "evaluator":  # it takes no part in the job: it has its own devices and waits for nobody
        joined = runtime.alone()
    elif on_loss == "continue" and (spec.num_processes > 1 or WORLDS in os.environ):
        from jdist.cluster.worlds.elastic import join_job  # which most programs do not need

        _check_can_continue(shard, all_reduce)
        joined = join_job(spec, options.timeouts, os.environ)
    else:
        joined = runtime.start(spec, **options.timeouts)
    with joined.blocked():  # each process tells the others of its devices
        devices = jax.devices()
    check_devices(devices)
    if on_loss == "continue" and devices[0].platform != "cpu":
        raise StrategyError(
            f'`on_loss` is "continue", and the devices are of the platform {devices[0].platform!r}: jdist moves processes from '
            "world to world on CPUs alone so far. Leave it out; `jdist launch --max-restarts` starts all again after a loss."
        )
    failpoints.reached(Point.AFTER_INIT)
    if jax.process_count() != joined.num_processes:
        raise StrategyError(
            f"JAX runs as {jax.process_count()} processes, but the cluster ({spec}) has {joined.num_processes}. On a Cloud "
            "TPU that spans several hosts, start every host's process with the variables in docs/cluster_environments.md."
        )
    strategy = dataclasses.replace(made(devices), cluster=joined)
    joined.follow(strategy, lambda strategy: placement.renew(strategy, made(jax.devices())))
    return strategy


def multi_worker_on(
    devices: Iterable[Device],
    *,
    communication: CommunicationOptions | Mapping[str, Any] | None = None,
    transform: Transform = "shard_map",
    all_reduce: AllReduce | None = None,
    axis: str = "replica",
    shard: Shard | Mapping[str, Any] | None = None,
    topology: str | None = None,
) -> Strategy:
    """Makes what `multi_worker` would be on these devices of all processes; starts none, and waits for none."""
    _check_transform(transform)
    devices = tuple(sorted(devices, key=lambda device: device.process_index))
    reduction = _reduction(all_reduce, _communication(communication), devices)
    check_reduction(reduction, transform)
    return strategy_over(
        devices,
        name="multi_worker",
        axis=axis,
        transform=transform,
        reduction=reduction,
        topology=topology,
        shard=shard,
    )


def _check_can_continue(shard: object, all_reduce: object) -> None:
    """Refuses options that keep something in one process alone, or may do so."""
    for name, value in (("shard", shard), ("all_reduce", all_reduce)):
        if value is not None:
            raise StrategyError(
                f'`{name}` is {value!r} and `on_loss` is "continue", which keeps whole copies of the state and the default '
                'all-reduce so far. Leave one of them out; with `on_loss="stop"` the job goes on from its last checkpoint.'
            )


def _check_transform(transform: Transform) -> None:
    fix = "Under pmap each process has arrays of its own."
    checks.choice("transform", transform, TRANSFORMS, StrategyError, fix=fix)


def _communication(options: CommunicationOptions | Mapping[str, Any] | None) -> CommunicationOptions:
    if isinstance(options, CommunicationOptions):
        return options
    if options is not None and not isinstance(options, Mapping):
        raise StrategyError(f"`communication` is a {type(options).__name__}; pass a `jdist.CommunicationOptions`.")
    known = [field.name for field in dataclasses.fields(CommunicationOptions)]
    checks.known_options("`communication`", options or {}, known, StrategyError)
    return CommunicationOptions(**(options or {}))


def _reduction(all_reduce: AllReduce | None, options: CommunicationOptions, devices: tuple[Device, ...]) -> Reduction:
    if options.implementation == "nccl" and devices[0].platform != "gpu":
        raise DeviceError(
            f'`implementation` is "nccl", which needs GPUs; JAX has {devices[0].platform} devices here. Use "auto".'
        )
    if all_reduce is not None:
        if options.bytes_per_pack or options.implementation == "ring":
            raise StrategyError(
                "`all_reduce` and `communication` both say how gradients are summed; leave out `bytes_per_pack` and "
                "`implementation`, or `all_reduce`."
            )
        if all_reduce == "hierarchical":
            processes = len({device.process_index for device in devices})
            all_reduce = {"name": "hierarchical", "inner": len(devices) // processes, "outer": processes}
        return make_reduction(all_reduce)
    if options.implementation == "ring":
        return ring()
    return bucketed(options.bytes_per_pack) if options.bytes_per_pack else psum()
