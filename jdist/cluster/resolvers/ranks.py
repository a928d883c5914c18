"""The spec of a rank, from a launcher's variables: rank and count, often also those of this host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jdist.cluster import environment
from jdist.cluster.address import join, refused
from jdist.cluster.resolvers.jax_env import (
    ADDRESS,
    DEVICES,
    MOST,
    chosen_coordinator,
    chosen_port,
    derived_port,
    workers_spec,
)
from jdist.cluster.resolvers.slurm import VISIBLE, is_task
from jdist.cluster.spec import ClusterSpec


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """The variables in which a launcher tells each rank its place."""

    name: str  # the launcher, for messages
    count: str  # the variable of the number of ranks
    rank: str  # that of this rank
    local_count: str  # that of the number of ranks on this host
    local_rank: str  # that of this rank among these
    command: str  # how to pass a variable to all ranks
    # variables of the job's number: from the first that is set follows process 0's port
    jobs: tuple[str, ...] = ("PBS_JOBID", "LSB_JOBID", "SLURM_JOB_ID")
    resolver: str = "mpi"  # the spec's `resolver`
    needs_local: bool = False  # whether it always sets both local variables
    shows_all: bool = False  # whether its ranks all see the same GPUs, also where a variable says which

    def is_there(self, environ: Mapping[str, str]) -> bool:
        """Whether it has started this process; False if srun has, whose variables also tell where process 0 is."""
        count, rank = (environment.text(environ, name) for name in (self.count, self.rank))
        return bool(count or rank) and not is_task(environ, count, rank)

    @property
    def mend(self) -> str:
        """The remedy where a variable is wrong."""
        return f"{self.name} sets it; start the program by it, or unset its variables."


def ranked(
    environ: Mapping[str, str], launcher: Launcher, first: Callable[[], tuple[str, str] | None] = lambda: None
) -> ClusterSpec:
    """Makes the spec of a rank; `launcher` names the variables."""
    # `first` finds process 0's address and its variables. It is called only if the ranks are on
    # several hosts and JAX_COORDINATOR_ADDRESS is not set.
    mend = launcher.mend
    count = environment.needed(environ, launcher.count, mend, least=1)
    if count > MOST:
        raise refused(launcher.count, count, f"at most {MOST} ranks", mend)
    index = environment.index(environ, launcher.rank, count, launcher.count, mend)
    local_count, local_index = _local(environ, launcher, count)
    coordinator, sources = _first(environ, launcher, first, everyone_here=local_count == count)
    addresses, addresses_from = chosen_coordinator(environ, [coordinator] + [None] * (count - 1), *sources)
    gpus = _one_gpu(environ, launcher, local_count, local_index)
    return workers_spec(
        environ,
        launcher.resolver,
        addresses,
        index,
        jobs_from=addresses_from,
        count_from=launcher.count,
        index_from=launcher.rank,
        gpus=gpus,
        gpus_from=None if gpus is None else launcher.local_rank,
    )


def _local(environ: Mapping[str, str], launcher: Launcher, count: int) -> tuple[int | None, int | None]:
    """Reads the number of ranks on this host, and this rank among them; None where the launcher does not tell."""
    read = environment.needed if launcher.needs_local else environment.number
    local_count = read(environ, launcher.local_count, launcher.mend, least=1)
    if local_count is None:
        return None, environment.number(environ, launcher.local_rank, launcher.mend)
    if local_count > count:
        raise refused(launcher.local_count, local_count, f"at most {count}, the number of all ranks", launcher.mend)
    return local_count, environment.index(
        environ, launcher.local_rank, local_count, launcher.local_count, launcher.mend
    )


def _first(
    environ: Mapping[str, str],
    launcher: Launcher,
    first: Callable[[], tuple[str, str] | None],
    *,
    everyone_here: bool,
) -> tuple[str | None, tuple[str, ...]]:
    """Finds process 0's address and its variables; None if JAX_COORDINATOR_ADDRESS has it."""
    if environment.address(environ, ADDRESS) is not None:
        return None, (launcher.count,)
    if everyone_here:
        named = next((name for name in launcher.jobs if environment.text(environ, name) is not None), "")
        port, port_from = chosen_port(environ, derived_port(environ.get(named, "")), named)
        return join("localhost", port), (launcher.local_count, port_from, launcher.count)
    if (rank_0 := first()) is not None:
        address, address_from = rank_0
        return address, (address_from, launcher.count)
    why = f"the ranks are on several hosts and {launcher.name} does not tell which is rank 0's"
    allowed = f"the address of rank 0, host:port, as {why}"
    raise refused(ADDRESS, None, allowed, f"Say where rank 0 runs: {launcher.command}.")


def _one_gpu(
    environ: Mapping[str, str], launcher: Launcher, local_count: int | None, local_index: int | None
) -> tuple[int, ...] | None:
    """Chooses one GPU for each of several ranks of a host; None for all that a rank sees, if it is alone or sees its own."""
    if local_index is None or local_count == 1:
        return None
    visible = next((value for name in VISIBLE if (value := environment.text(environ, name)) is not None), None)
    if visible is not None and not (launcher.shows_all and len(visible.split(",")) >= (local_count or 2)):
        return None
    if local_count is None and environment.text(environ, DEVICES) is None:
        why = f"{launcher.local_rank} alone does not tell whether a rank has all GPUs of its host or one of them"
        mend = f"Set it, or {DEVICES} to the indices of each rank's GPUs."
        raise refused(launcher.local_count, None, f"the number of ranks on this host: {why}", mend)
    return (local_index,)
