"""Parameters on servers, steps on workers: asynchronous training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.data.dataset import DistributedDataset
from jdist.data.distribute import distributed_dataset
from jdist.errors import StrategyError
from jdist.ps.cluster_coordinator import ClusterCoordinator
from jdist.ps.link import Times
from jdist.ps.partition import Partitioner, Placement, min_size
from jdist.ps.remote_state import RemoteState
from jdist.ps.running import PsJob, PsOptions, Servers
from jdist.ps.shard import OnStale, Rules
from jdist.ps.step import PsStep
from jdist.reduction import psum
from jdist.remote import fetched
from jdist.strategies.one_device import one_device
from jdist.strategy import Operations, Strategy
from jdist.transforms.feed import settle
from jdist.transforms.options import StepOptions

PyTree = Any


def parameter_server(
    *,
    local_workers: int = 2,
    local_ps: int = 1,
    partitioner: Partitioner | None = None,
    placement: Placement = "round_robin",
    max_staleness: int | None = None,
    on_stale: OnStale = "refuse",
) -> Strategy:
    """Parameters and the optimiser's state live on servers; workers pull, compute gradients, and push, each at its own pace.

    Args:
        local_workers: processes of this machine that compute.
        local_ps: processes of this machine that keep the state.
        partitioner: into how many pieces a leaf is cut; None: `jdist.ps.min_size(256 << 10)`.
        placement: which server gets the next piece: "round_robin", or "bytes", the one that has least.
        max_staleness: updates that may lie between the pull and the push of a gradient; None: any number.
        on_stale: beyond that, "refuse" it, so that it is computed again, or "down_weight" it.

    Returns:
        A Strategy. `strategy.init` returns a handle; a step returns at once, with metrics that are futures.

    Raises:
        StrategyError: an argument is not allowed.

    The processes are started when they are first needed, and end with this one.
    """
    for name, number in (("local_workers", local_workers), ("local_ps", local_ps)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise StrategyError(f"`{name}` is {number!r}; it must be a whole number of at least 1.")
    rules = Rules(
        max_staleness=max_staleness, on_stale=on_stale, non_finite="skip"
    )  # workers do not push what is refused
    options = PsOptions(partitioner=partitioner or min_size(), placement=placement, rules=rules, times=Times())
    return _strategy(PsJob(functools.partial(_local, local_workers, local_ps), options))


def _local(workers: int, ps: int) -> Servers:
    """Processes of this machine."""
    from jdist.ps.local import LocalCluster
    from jdist.ps.transport.rpc import RpcChannel, Security

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
