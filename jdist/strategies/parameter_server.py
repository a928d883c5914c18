"""Parameters on servers, steps on workers: asynchronous training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Unpack

import jax

from jdist.cluster.idle_launch import note_coordinator
from jdist.cluster.spec import ClusterSpec
from jdist.core.operations import Operations
from jdist.core.remote import RemoteTree, fetched
from jdist.core.state_picture import StatePicture
from jdist.core.step_state import pack, unpack
from jdist.core.strategy import Strategy
from jdist.data.batch_axis import check_axes, is_first, turn_back, turn_source
from jdist.data.dataset import DistributedDataset
from jdist.data.feed import distributed_dataset
from jdist.data.options import FeedOptions
from jdist.errors import DatasetError, StepError, StrategyError
from jdist.ps.coordinator.api import ClusterCoordinator
from jdist.ps.coordinator.datasets import WorkerDataset
from jdist.ps.coordinator.remote_state import RemotePart, RemoteState
from jdist.ps.coordinator.servers import Servers, connect_servers
from jdist.ps.coordinator.session import Session
from jdist.ps.local import LocalCluster
from jdist.ps.program.partition import Partitioner, Placement
from jdist.ps.program.wire_dtype import Wire
from jdist.ps.protocol.shard import OnStale
from jdist.ps.protocol.times import Times
from jdist.ps.step import PsStep
from jdist.ps.transport.grpc_transport import RpcChannel
from jdist.ps.transport.security import Security
from jdist.reduction import psum
from jdist.step.options import StepOptions
from jdist.strategies.mirrored import mirrored
from jdist.strategies.ps_arguments import Mode, PsArguments, PsKeywords
from jdist.support.arrays import check_arguments_not_donated, to_host
from jdist.support.tracebacks import without_own_frames

PyTree = Any


@without_own_frames
def parameter_server(
    cluster: ClusterSpec | None = None,
    *,
    local_workers: int | None = None,
    local_ps: int | None = None,
    devices_per_worker: int | None = None,
    insecure: bool = False,
    keep_servers: bool = False,
    start_timeout_s: float = 300.0,
    partitioner: Partitioner | None = None,
    placement: Placement = "round_robin",
    mode: Mode = "async",
    backup_workers: int = 0,
    max_staleness: int | None = None,
    on_stale: OnStale = "refuse",
    wire: Wire = "float32",
    ps_replicas: int = 1,
    times: Times | None = None,
    axis: str = "replica",
) -> Strategy:
    """Keeps parameters and the optimiser's state on servers; workers pull, compute gradients, and push, each at its own pace.

    The calling process is the coordinator: the chief of the cluster, or the only process of yours. Workers and parameter
    servers run `jdist serve`, and hold none of your code.

    Args:
        cluster: where they are; None: as the environment says (TF_CONFIG), and if it says nothing, processes of this machine.
        local_workers: processes of this machine that compute, instead of a cluster; None for 2.
        local_ps: processes of this machine that keep the state, instead of a cluster; None for as many as `ps_replicas`.
        devices_per_worker: virtual CPU devices of each such worker, over which it runs its step mirrored; None: one on a CPU,
            all that JAX finds on other machines.
        insecure: go on although servers on other machines lack TLS or a token.
        keep_servers: leave a cluster's servers running when the program is done, for the next one.
        start_timeout_s: how long to wait for a cluster's servers.
        partitioner: into how many pieces a leaf is cut; None: `jdist.ps.min_size(256 << 10)`.
        placement: which server gets the next piece: "round_robin", or "bytes", the one that has least.
        mode: "async", where each gradient is an update; or "sync", where the mean of one gradient of each worker is: a call's
            batch is cut into as many parts.
        backup_workers: in synchronous mode, how many of the workers are to spare: so many fewer gradients make an update, and
            those that come last are computed again, for a later one (Chen et al. 2016, "Revisiting Distributed
            Synchronous SGD").
        max_staleness: updates that may lie between the pull and the push of a gradient; None: any number.
        on_stale: beyond that, "refuse" it, so that it is computed again, or "down_weight" it.
        wire: as what arrays of float32 are pulled and pushed: "float32"; or "bf16", rounded to the nearest bfloat16, which is
            half the bytes. Servers keep, update and average in float32; single numbers, and what workers carry from step to
            step (a layer's running statistics), are not rounded, nor is anything in `strategy.fetch` or a checkpoint.
        ps_replicas: copies of each shard. With 2 each parameter server also keeps a backup of another's shard, which takes its
            place when it is lost: nothing is lost then, nor computed again. It takes twice the memory, and gradients travel
            twice. With 1 the state goes back to the last snapshot, and what was done since is computed again.
        times: how long workers and servers are waited for; None: `jdist.ps.Times()`.
        axis: name of the mesh axis of a worker's devices, for steps that call `lax.pmean(x, axis_name=...)` themselves.

    Returns:
        A Strategy. `strategy.init` returns a handle; a step returns at once, with metrics that are futures. In the evaluator
        of a cluster it is `mirrored` over its own devices.

    Raises:
        StrategyError: an argument is not allowed, the cluster lacks workers or servers, or this process is one of them.
        ClusterConfigError: the environment or a certificate is not right.
        ClusterError: a server refuses this process; it names the server, and why.
        ClusterTimeoutError: not all servers came in time.
        LaunchError: a process of this machine did not come up.
    """
    arguments = PsArguments(
        cluster=cluster,
        local_workers=local_workers,
        local_ps=local_ps,
        devices_per_worker=devices_per_worker,
        insecure=insecure,
        keep_servers=keep_servers,
        start_timeout_s=start_timeout_s,
        partitioner=partitioner,
        placement=placement,
        mode=mode,
        backup_workers=backup_workers,
        max_staleness=max_staleness,
        on_stale=on_stale,
        wire=wire,
        ps_replicas=ps_replicas,
        times=times,
        axis=axis,
    )
    spec, options = arguments.resolve()
    if options is None:
        return mirrored(axis=axis)
    # A cluster's errors are raised here; local processes start when they are needed.
    counts = (arguments.local_workers or 2, arguments.local_ps or options.replicas)
    servers = (
        functools.partial(_local_servers, *counts, arguments.devices_per_worker)
        if spec is None
        else connect_servers(spec, insecure=insecure, keep=keep_servers, start_timeout_s=start_timeout_s)
    )
    note_coordinator()
    return _strategy(Session(servers, options, counts=counts))


def check_parameter_server(**arguments: Unpack[PsKeywords]) -> None:
    """Refuses arguments as `parameter_server` does; starts nothing, and looks for no server."""
    PsArguments(**arguments).resolve()


def _local_servers(workers: int, ps: int, devices_per_worker: int | None) -> Servers:
    cluster = LocalCluster(workers=workers, ps=ps, devices_per_worker=devices_per_worker)
    security = Security(token=cluster.token)
    return Servers(
        workers=tuple(cluster.workers),
        ps=tuple(cluster.ps),
        connect=lambda address: RpcChannel(address, security=security),
        close=cluster.close,
        processes=lambda: tuple(cluster.pids),
        running_workers=lambda: cluster.running_workers,
    )


def _strategy(job: Session) -> Strategy:
    def init(strategy: Strategy, fn: Callable[..., PyTree], args: tuple[PyTree, ...]) -> RemoteState:
        check_arguments_not_donated("strategy.init", args, {})
        return RemoteState(job, jax.device_get(jax.jit(lambda *args: pack(fn(*args)))(*args)))

    def fetch(strategy: Strategy, state: PyTree) -> PyTree:
        if isinstance(state, RemoteTree):
            return state.fetch()  # arrays of the caller's own
        return unpack(jax.tree.map(to_host, pack(fetched(state))))

    def check(strategy: Strategy, state: PyTree) -> None:
        job.join()

    def show(strategy: Strategy, state: PyTree | None) -> StatePicture:
        if state is None:
            return job.show(None)
        whole = state.whole if isinstance(state, RemotePart) else state
        if not isinstance(whole, RemoteState) or whole.job is not job:
            kind = "that of another parameter server" if isinstance(whole, RemoteState) else f"a {type(state).__name__}"
            raise StepError(
                f"strategy.show: this state is not of this parameter_server: it is {kind}. `strategy.init(create, key)` makes "
                "one that is, and `jdist.show(state)` shows where this one is. How a state is cut up a step decides, so of "
                "shapes alone there is nothing to show."
            )
        return state.show()

    def feed(strategy: Strategy, source: Iterable[PyTree], options: FeedOptions) -> DistributedDataset:
        batch_axis, lead = options.batch_axis, int(options.steps_per_call > 1)
        check_axes(batch_axis, DatasetError)

        def turn(batch: PyTree) -> PyTree:
            return turn_back(batch, batch_axis, lead=lead)[0]

        return distributed_dataset(
            turn_source(source, batch_axis),
            num_replicas=job.options.gradients_per_update * job.on_worker.num_replicas,
            place=None if is_first(batch_axis) else turn,
            place_spec=None if is_first(batch_axis) else turn,
            partial=options.partial,
            with_mask=options.with_mask,
            steps_per_call=options.steps_per_call,
            shapes=options.shapes,
            prefetch=options.input.prefetch,
        )

    def feed_on_workers(strategy: Strategy, fn: Callable[..., Any], options: FeedOptions) -> WorkerDataset:
        if options.steps_per_call != 1:
            raise StrategyError(
                "`steps_per_call` is for batches that the program feeds; a call of a step returns at once. Leave it at 1."
            )
        if not is_first(options.batch_axis):
            raise StrategyError(
                f"`batch_axis` is {options.batch_axis!r}; batches that workers read have their rows first. Leave it out, "
                "and swap the axes in the step."
            )
        feed = {"partial": options.partial, "with_mask": options.with_mask, "prefetch": options.input.prefetch}
        return job.dataset(fn, feed)

    def run(strategy: Strategy, fn: Callable[..., PyTree], args: tuple[Any, ...], kwargs: dict[str, Any]) -> PyTree:
        raise StrategyError(
            "under a parameter server there are no replicas that run the same function at the same time, so there is no "
            "`strategy.run`. `strategy.coordinator.schedule(fn, args)` runs it on one worker."
        )

    def distribute(strategy: Strategy, step: Callable[..., Any], options: StepOptions) -> PsStep:
        return PsStep(strategy, job, step, options)

    return Strategy(
        name="parameter_server",
        reduction=psum(),
        operations=Operations(
            init=init,
            fetch=fetch,
            check=check,
            run=run,
            feed_batches=feed,
            feed_pipelines=feed_on_workers,
            distribute=distribute,
            describe=lambda _: job.describe(),
            show=show,
            coordinator=ClusterCoordinator(job),
        ),
    )
