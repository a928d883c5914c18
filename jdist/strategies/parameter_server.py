"""Parameters on servers, steps on workers: asynchronous training."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypedDict, Unpack, get_args

import jax
from jax.sharding import AbstractMesh, AxisType

from jdist.cluster.idle_launch import note_coordinator
from jdist.cluster.spec import ClusterSpec
from jdist.core.operations import Operations
from jdist.core.remote import RemoteTree, fetched
from jdist.core.state_report import StateReport
from jdist.core.step_state import pack, unpack
from jdist.core.strategy import Strategy
from jdist.data.batch_axis import check_axes, is_first, on_host
from jdist.data.dataset import DistributedDataset
from jdist.data.feed import distributed_dataset
from jdist.data.options import FeedOptions
from jdist.errors import DatasetError, StepError, StrategyError
from jdist.ps.coordinator.api import ClusterCoordinator
from jdist.ps.coordinator.datasets import WorkerDataset
from jdist.ps.coordinator.remote_state import RemotePart, RemoteState
from jdist.ps.coordinator.servers import check_place, cluster_of_environment, connect_servers
from jdist.ps.coordinator.session import PsOptions, Session
from jdist.ps.local import local_servers
from jdist.ps.program.layout import Wire
from jdist.ps.program.partition import Partitioner, Placement, min_size
from jdist.ps.protocol.shard import OnStale, Rules
from jdist.ps.protocol.sync_rounds import Rounds
from jdist.ps.protocol.times import Times
from jdist.ps.serve import IS_SERVER
from jdist.ps.step import PsStep
from jdist.reduction import psum
from jdist.step.options import StepOptions
from jdist.strategies.local import LOCAL, check_axis
from jdist.strategies.over_devices import mirrored, one_device
from jdist.support import checks
from jdist.support.arrays import check_arguments_not_donated, to_host
from jdist.support.tracebacks import without_own_frames
from jdist.support.words import did_you_mean
from jdist.typing import PyTree

Mode = Literal["async", "sync"]
_LOCAL = ("local_workers", "local_ps", "devices_per_worker")
_LEAST = {**dict.fromkeys(_LOCAL, 1), "backup_workers": 0, "max_staleness": 0, "ps_replicas": 1}
_MOST = {"ps_replicas": 2}


class PsKeywords(TypedDict, total=False):
    """The fields of `PsArguments` after `cluster`, as an editor and a type checker see them."""

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


@dataclass(frozen=True)
class PsArguments:
    """The arguments of `jdist.parameter_server`, which describes them; each is checked by itself."""

    cluster: ClusterSpec | None = None
    _: KW_ONLY
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
                "this process is a worker that imported the program for a dataset function: put code that it must not run "
                'under `if __name__ == "__main__":`.'
            )
        if self.cluster is not None and not isinstance(self.cluster, ClusterSpec):
            raise StrategyError(
                f"`cluster` is a {type(self.cluster).__name__}; pass a `jdist.cluster.ClusterSpec`, or leave it out."
            )
        if self.cluster is not None and self.is_local:
            raise StrategyError(
                "both `cluster` and processes of this machine are given; leave out `local_workers`, `local_ps` and "
                "`devices_per_worker`."
            )
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) is not getattr(PsArguments, name):  # the default, which may be None
                number = checks.whole_number(name, value, StrategyError, least=least, most=_MOST.get(name))
                object.__setattr__(self, name, number)
        for name in ("insecure", "keep_servers"):
            object.__setattr__(self, name, checks.flag(name, getattr(self, name), StrategyError))
        checks.seconds("start_timeout_s", self.start_timeout_s, StrategyError, least=0)
        check_axis(self.axis)
        for name, allowed in (("placement", Placement), ("mode", Mode), ("on_stale", OnStale), ("wire", Wire)):
            checks.choice(name, getattr(self, name), get_args(allowed), StrategyError)
        if self.partitioner is not None and not callable(self.partitioner):
            raise StrategyError(
                f"`partitioner` is {self.partitioner!r}; it must be `jdist.ps.fixed_shards(n)`, `jdist.ps.min_size(bytes)`, "
                "`jdist.ps.max_size(bytes)`, or None for `min_size(256 << 10)`."
            )
        if not isinstance(self.times, Times | None):
            raise StrategyError(f"`times` is a {type(self.times).__name__}; pass a `jdist.ps.Times`, or leave it out.")
        if self.mode == "async" and self.backup_workers:
            raise StrategyError(
                '`backup_workers` is for `mode="sync"`: in asynchronous mode nobody waits for the last worker.'
            )
        if self.mode == "sync" and self.max_staleness is not None:
            raise StrategyError('`max_staleness` is for asynchronous mode: with `mode="sync"` no gradient is stale.')

    @property
    def is_local(self) -> bool:
        """Returns whether processes of this machine are asked for."""
        return any(getattr(self, name) is not None for name in _LOCAL)

    def resolve(self) -> tuple[ClusterSpec | None, PsOptions | None]:
        """Checks the arguments against the cluster; looks for no server."""
        # No cluster: processes of this machine. No options: this is the cluster's evaluator.
        spec = self.cluster if self.cluster is not None or self.is_local else cluster_of_environment()
        if spec is not None and spec.task_type == "evaluator":
            return spec, None
        if spec is not None:
            check_place(spec)
        num_ps = len(spec.jobs["ps"]) if spec is not None else self.local_ps or self.ps_replicas
        if num_ps < self.ps_replicas:
            fix = "Add one to the cluster, or leave `ps_replicas` at 1." if spec else "Give `local_ps=2` or more."
            raise StrategyError(
                f"`ps_replicas` is 2 and there is 1 parameter server; a shard's backup is on another one. {fix}"
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
            rounds=Rounds(size=workers - self.backup_workers, spare=self.backup_workers) if is_sync else None,
            replicas=self.ps_replicas,
        )


@without_own_frames
def parameter_server(cluster: ClusterSpec | None = None, **options: Unpack[PsKeywords]) -> Strategy:
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
    arguments = _arguments(cluster, options)
    spec, ps_options = arguments.resolve()
    if ps_options is None:
        return mirrored(axis=arguments.axis)
    # A cluster's errors are raised here; local processes start when they are needed.
    counts = (arguments.local_workers or 2, arguments.local_ps or ps_options.replicas)
    servers = (
        functools.partial(local_servers, *counts, arguments.devices_per_worker)
        if spec is None
        else connect_servers(
            spec, insecure=arguments.insecure, keep=arguments.keep_servers, start_timeout_s=arguments.start_timeout_s
        )
    )
    note_coordinator()
    return _strategy(Session(servers, ps_options, counts=counts))


parameter_server.__signature__ = inspect.signature(PsArguments, eval_str=True).replace(  # type: ignore[attr-defined]  # `inspect` reads it
    return_annotation=Strategy
)


def _arguments(cluster: ClusterSpec | None, options: PsKeywords) -> PsArguments:
    known = inspect.signature(PsArguments).parameters
    for name in options:
        if name not in known:
            raise StrategyError(
                f"jdist.parameter_server has no option `{name}`.{did_you_mean(name, known)} It has: {', '.join(known)}."
            )
    return PsArguments(cluster, **options)


def check_parameter_server(cluster: ClusterSpec | None = None, **options: Unpack[PsKeywords]) -> None:
    """Refuses arguments as `parameter_server` does; starts nothing, and looks for no server."""
    _arguments(cluster, options).resolve()


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

    def report(strategy: Strategy, state: PyTree | None) -> StateReport:
        if state is None:
            return job.show(None)
        whole = state.whole if isinstance(state, RemotePart) else state
        if not isinstance(whole, RemoteState) or whole.job is not job:
            kind = "that of another parameter server" if isinstance(whole, RemoteState) else f"a {type(state).__name__}"
            raise StepError(
                f"strategy.report: this state is not of this parameter_server: it is {kind}. `strategy.init(create, key)` "
                "makes one that is, and `jdist.show(state)` shows where this one is. A step decides how a state is cut "
                "up, so shapes alone show nothing."
            )
        return state.show()

    def feed(strategy: Strategy, source: Iterable[PyTree], options: FeedOptions) -> DistributedDataset:
        check_axes(options.batch_axis, DatasetError)
        rounds = job.options.rounds
        num_replicas = (1 if rounds is None else rounds.size) * job.on_worker.num_replicas
        return distributed_dataset(source, on_host(dataclasses.replace(options, num_replicas=num_replicas)))

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
            "under a parameter server no replicas run the same function at the same time, so it has no "
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
            report=report,
            coordinator=ClusterCoordinator(job),
        ),
    )


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
