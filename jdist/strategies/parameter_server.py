"""Parameters on servers, steps on workers: asynchronous training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.cluster.spec import ClusterSpec
from jdist.data.dataset import DistributedDataset
from jdist.data.distribute import distributed_dataset
from jdist.errors import StrategyError
from jdist.ps.cluster_coordinator import ClusterCoordinator
from jdist.ps.link import Times
from jdist.ps.local import LocalCluster
from jdist.ps.partition import Partitioner, Placement, min_size
from jdist.ps.remote_state import RemoteState
from jdist.ps.running import PsJob, PsOptions, Servers
from jdist.ps.security import Security
from jdist.ps.servers import check_place, cluster_of_environment, connected
from jdist.ps.shard import OnStale, Rules
from jdist.ps.step import PsStep
from jdist.ps.transport.rpc import RpcChannel
from jdist.reduction import psum
from jdist.remote import fetched
from jdist.strategies.mirrored import mirrored
from jdist.strategies.one_device import one_device
from jdist.strategy import Operations, Strategy
from jdist.transforms.feed import settle
from jdist.transforms.options import StepOptions

PyTree = Any


def parameter_server(
    cluster: ClusterSpec | None = None,
    *,
    local_workers: int | None = None,
    local_ps: int | None = None,
    insecure: bool = False,
    keep_servers: bool = False,
    start_timeout_s: float = 300.0,
    partitioner: Partitioner | None = None,
    placement: Placement = "round_robin",
    max_staleness: int | None = None,
    on_stale: OnStale = "refuse",
    ps_replicas: int = 1,
    lost_after_s: float = 10.0,
) -> Strategy:
    """Parameters and the optimiser's state live on servers; workers pull, compute gradients, and push, each at its own pace.

    The calling process is the coordinator: the chief of the cluster, or the only process of yours. Workers and parameter
    servers run `jdist serve`, and hold none of your code.

    Args:
        cluster: where they are; None: as the environment says (TF_CONFIG), and if it says nothing, processes of this machine.
        local_workers: processes of this machine that compute, instead of a cluster; None for 2.
        local_ps: processes of this machine that keep the state, instead of a cluster; None for as many as `ps_replicas`.
        insecure: go on although servers on other machines lack TLS or a token.
        keep_servers: leave a cluster's servers running when the program is done, for the next one.
        start_timeout_s: how long to wait for a cluster's servers.
        partitioner: into how many pieces a leaf is cut; None: `jdist.ps.min_size(256 << 10)`.
        placement: which server gets the next piece: "round_robin", or "bytes", the one that has least.
        max_staleness: updates that may lie between the pull and the push of a gradient; None: any number.
        on_stale: beyond that, "refuse" it, so that it is computed again, or "down_weight" it.
        ps_replicas: copies of each shard. With 2 each parameter server also keeps a backup of another's shard, which takes its
            place when it is lost: nothing is lost then, nor computed again. It takes twice the memory, and gradients travel
            twice. With 1 the state goes back to the last snapshot, and what was done since is computed again.
        lost_after_s: seconds without an answer after which a worker or a parameter server counts as lost. Too short a time
            costs work, never correctness.

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
    for name, number in (("local_workers", local_workers), ("local_ps", local_ps)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise StrategyError(f"`{name}` is {number!r}; it must be a whole number of at least 1.")
    if ps_replicas not in (1, 2) or isinstance(ps_replicas, bool):
        raise StrategyError(f"`ps_replicas` is {ps_replicas!r}; it must be 1, or 2 for a backup of each shard.")
    if not isinstance(lost_after_s, int | float) or isinstance(lost_after_s, bool) or not 0 < lost_after_s < 3600:
        raise StrategyError(f"`lost_after_s` is {lost_after_s!r}; it must be a number of seconds between 0 and 3,600.")
    local = local_workers is not None or local_ps is not None
    if cluster is not None and local:
        raise StrategyError(
            "both `cluster` and processes of this machine are given; leave out `local_workers` and `local_ps`."
        )
    if cluster is not None and not isinstance(cluster, ClusterSpec):
        raise StrategyError(
            f"`cluster` is a {type(cluster).__name__}; pass a `jdist.cluster.ClusterSpec`, or leave it out."
        )
    spec = cluster if cluster is not None or local else cluster_of_environment()
    if spec is not None and spec.task_type == "evaluator":
        return mirrored()
    if spec is not None:
        check_place(spec)
    num_ps = len(spec.jobs["ps"]) if spec is not None else local_ps or ps_replicas
    if num_ps < ps_replicas:
        raise StrategyError(
            "`ps_replicas` is 2 and there is 1 parameter server; a shard's backup is on another one. "
            + ("Give `local_ps=2` or more." if spec is None else "Add one to the cluster, or leave `ps_replicas` at 1.")
        )
    if spec is None:
        start = functools.partial(_local_servers, local_workers or 2, num_ps)
    else:
        servers = connected(spec, insecure=insecure, keep=keep_servers, start_timeout_s=start_timeout_s)
        start = lambda: servers  # noqa: E731  # errors of a cluster are heard of here; processes of this machine can wait
    # Workers do not push what is refused.
    rules = Rules(max_staleness=max_staleness, on_stale=on_stale, non_finite="skip")
    options = PsOptions(
        partitioner=partitioner or min_size(),
        placement=placement,
        rules=rules,
        times=Times(ping_s=min(1.0, lost_after_s / 4), lost_after_s=lost_after_s),
        replicas=ps_replicas,
    )
    return _strategy(PsJob(start, options))


def _local_servers(workers: int, ps: int) -> Servers:
    cluster = LocalCluster(workers=workers, ps=ps)
    security = Security(token=cluster.token)
    return Servers(
        workers=tuple(cluster.workers),
        ps=tuple(cluster.ps),
        connect=lambda address: RpcChannel(address, security=security),
        close=cluster.close,
        pids=tuple(cluster.pids),
    )


def _strategy(job: PsJob) -> Strategy:
    on_worker = one_device(jax.devices("cpu")[0] if jax.default_backend() == "cpu" else None)

    def init(strategy: Strategy, fn: Callable[..., PyTree], args: tuple[PyTree, ...]) -> RemoteState:
        return RemoteState(job, jax.device_get(jax.jit(fn)(*args)))

    def fetch(strategy: Strategy, state: PyTree) -> PyTree:
        return jax.tree.map(_on_host, fetched(state))

    def check(strategy: Strategy, state: PyTree) -> None:
        job.join()

    def feed(strategy: Strategy, source: Iterable[PyTree], options: dict[str, Any]) -> DistributedDataset:
        chosen = settle(options["options"], options["prefetch"])
        return distributed_dataset(
            source,
            num_replicas=1,
            place=None,
            partial=options["partial"],
            with_mask=options["with_mask"],
            steps_per_call=options["steps_per_call"],
            prefetch=chosen.prefetch,
        )

    def refused(*_: Any) -> Any:
        raise StrategyError("this is not there under `jdist.parameter_server` yet.")

    def distribute(strategy: Strategy, step: Callable[..., Any], options: StepOptions) -> PsStep:
        return PsStep(strategy, on_worker, job, step, options)

    return Strategy(
        name="parameter_server",
        reduction=psum(),
        coordinator=ClusterCoordinator(job),
        operations=Operations(
            init=init,
            fetch=fetch,
            check=check,
            run=refused,
            distribute_dataset=feed,
            distribute_datasets_from_function=refused,
            distribute=distribute,
        ),
    )


def _on_host(x: Any) -> Any:
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return x if is_key else np.asarray(x)
