"""Launchers that give each process a rank, a row each: those of MPI, torchrun, submitit's local executor."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jdist.cluster import environment
from jdist.cluster.address import host_problem, join, refused, split
from jdist.cluster.resolvers.host_lists import SM_CURRENT, SM_HOSTS, SM_PORT
from jdist.cluster.resolvers.jax_env import (
    ADDRESS,
    DEVICES,
    MOST,
    Gpus,
    chosen_coordinator,
    chosen_port,
    counted,
    derived_port,
    workers_spec,
)
from jdist.cluster.resolvers.slurm import COUNTS, NODES, VISIBLE, is_task
from jdist.cluster.spec import ClusterSpec


class Ranks(NamedTuple):
    """The variables of the number of ranks and this rank, and of the same among the ranks of this host."""

    number: str
    rank: str
    local_number: str
    local_rank: str


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A launcher, by the variables in which it tells each rank its place."""

    name: str  # for messages
    sets: Ranks
    command: str  # how to pass a variable to all ranks
    # variables of the job's number: from the first that is set follows process 0's port
    jobs: tuple[str, ...] = ("PBS_JOBID", "LSB_JOBID", "SLURM_JOB_ID")
    resolver: str = "mpi"  # the spec's `resolver`
    needs_local: bool = False  # whether it always sets both local variables
    shows_all: bool = False  # whether its ranks all see the same GPUs, also where a variable says which

    def has_started(self, environ: Mapping[str, str]) -> bool:
        """Returns whether it has started this process; False if srun has: srun's variables also tell where process 0 is."""
        count, rank = (environment.text(environ, name) for name in (self.sets.number, self.sets.rank))
        return bool(count or rank) and not is_task(environ, count, rank)

    @property
    def mend(self) -> str:
        """The remedy where a variable is wrong."""
        return f"{self.name} sets it; start the program by it, or unset its variables."


_FLUX_NODES = "FLUX_JOB_NNODES"
FLUX = Launcher(
    name="Flux",
    # It has no variable for the number of ranks of a node.
    sets=Ranks("FLUX_JOB_SIZE", "FLUX_TASK_RANK", f"FLUX_JOB_SIZE / {_FLUX_NODES}", "FLUX_TASK_LOCAL_ID"),
    jobs=("FLUX_JOB_ID",),
    command="flux run --env=JAX_COORDINATOR_ADDRESS=HOST:PORT",
)
# The first with its variable of the rank set counts. MVAPICH2, PALS and Flux set some of hydra's.
MPI = (
    FLUX,
    Launcher(
        name="MVAPICH2's mpirun_rsh",
        sets=Ranks(
            "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"
        ),
        command="mpirun_rsh ... JAX_COORDINATOR_ADDRESS=HOST:PORT python train.py",
    ),
    Launcher(
        name="PALS' mpiexec",
        sets=Ranks("PMI_SIZE", "PALS_RANKID", "PALS_LOCAL_SIZE", "PALS_LOCAL_RANKID"),
        jobs=("PALS_APID", "PBS_JOBID", "LSB_JOBID", "SLURM_JOB_ID"),
        command="mpiexec --env JAX_COORDINATOR_ADDRESS=HOST:PORT",
    ),
    Launcher(
        name="LSF's jsrun",
        sets=Ranks("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
        command="jsrun -E JAX_COORDINATOR_ADDRESS=HOST:PORT",
    ),
    Launcher(
        name="hydra, the mpiexec of MPICH and Intel MPI",
        sets=Ranks("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
        command="mpiexec -genv JAX_COORDINATOR_ADDRESS HOST:PORT",
    ),
)
_OPEN_MPI_URI = "OMPI_MCA_orte_hnp_uri"
OPEN_MPI = Launcher(
    name="Open MPI's mpirun",
    resolver="open_mpi",
    sets=Ranks(
        "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"
    ),
    jobs=("PMIX_NAMESPACE", _OPEN_MPI_URI),
    command="mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT",
    needs_local=True,
)
TORCHRUN = Launcher(
    name="torchrun",
    resolver="torchrun",
    sets=Ranks("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    jobs=("MASTER_PORT",),
    command="set JAX_COORDINATOR_ADDRESS=HOST:PORT, or MASTER_ADDR and MASTER_PORT, for all ranks",
    shows_all=True,
)
SUBMITIT = Launcher(
    name="submitit's local executor",
    resolver="submitit",
    sets=Ranks("SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_LOCALID"),
    jobs=("SUBMITIT_LOCAL_JOB_ID",),
    command="set JAX_COORDINATOR_ADDRESS=HOST:PORT before the job is submitted",
    needs_local=True,
    shows_all=True,
)


def mpi(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads rank and number of ranks as hydra (MPICH, Intel MPI), MVAPICH2, PALS, jsrun and Flux set them.

    Args:
        environ: the environment, with the variables of one of these launchers. None of them tells where rank 0 runs. Where
            all ranks are on one host, that is localhost; else set JAX_COORDINATOR_ADDRESS. The resolver does not apply to one
            rank, nor where Slurm's srun started it and the variables agree with its own. Several ranks of a host share its
            GPUs as under Open MPI.

    Example:
        >>> mpi({
        ...     "PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1",
        ...     "JAX_COORDINATOR_ADDRESS": "node1:7000",
        ... })
        ClusterSpec(worker 3, process 3 of 4; cluster: 4 worker; from mpi)

    Source: MPICH, "Hydra process manager"; MVAPICH2, mpispawn.c; ALCF, "Running jobs on Aurora"; IBM, "jsrun";
    flux-environment(7).
    """
    by_rank = (each for each in MPI if environment.text(environ, each.sets.rank) is not None)
    by_count = (each for each in reversed(MPI) if environment.text(environ, each.sets.number) is not None)
    launcher = next(by_rank, None) or next(by_count, None)
    if launcher is None or environment.text(environ, launcher.sets.number) == "1" or not launcher.has_started(environ):
        return None
    if launcher is FLUX:  # a node has as many ranks as any other, if that is a whole number
        ranks = environment.number(environ, FLUX.sets.number, FLUX.mend, least=1)
        nodes = environment.number(environ, _FLUX_NODES, FLUX.mend, least=1)
        if ranks is not None and nodes is not None and ranks % nodes == 0:
            environ = {**environ, FLUX.sets.local_number: str(ranks // nodes)}
    return _ranked(environ, launcher)


_OPEN_MPI_HOSTFILE = "OMPI_MCA_orte_default_hostfile"
_MPIJOB = "/etc/mpi/"  # where Kubeflow's MPI operator puts the list of hosts; mpirun passes its path to all ranks
# In a pod mpirun may run in one of its own, without a rank: the operator sets the last two, also with another list of hosts.
_PODS = ("KUBERNETES_SERVICE_HOST", "K_MPI_JOB_ROLE", "OMPI_MCA_orte_keep_fqdn_hostnames")
_URI = re.compile(r"([0-9]{1,18})\.[0-9]+;tcp(?:://([^,:]+)|6://\[([^,\]]+)).*", re.DOTALL)


def open_mpi(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads this process's rank, the number of ranks, and where mpirun runs.

    Args:
        environ: the environment, with the OMPI_ variables of mpirun.

    Where all ranks are on one host, rank 0 is at localhost. Else it is taken to be on mpirun's own host, which mpirun tells
    up to version 4; on SageMaker on the host of the SM_CURRENT_HOST that mpirun passes on. With version 5, in a Kubeflow MPIJob
    (where mpirun has a pod of its own), or if rank 0 is elsewhere, say where:
    `mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT ...`.

    Several ranks of a host take one GPU each, in order. Where CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES is set, each
    rank takes all that it sees; a rank alone on its host takes all GPUs. It does not apply where Slurm's srun started the
    process and the variables agree with its own.

    Example:
        >>> open_mpi({
        ...     "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        ...     "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        ... })
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from open_mpi)

    Source: Open MPI, "Environment variables"; jax/_src/clusters/ompi_cluster.py; aws/sagemaker-training-toolkit, mpi.py;
    kubeflow/mpi-operator, pkg/controller/mpi_job_controller.go.
    """
    return _ranked(environ, OPEN_MPI, _mpirun_address) if OPEN_MPI.has_started(environ) else None


def _mpirun_address(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Finds the address of process 0 on mpirun's host, and its variables; None where process 0 is elsewhere."""
    current = None if environment.text(environ, SM_HOSTS) is None else environment.host(environ, SM_CURRENT)
    if current is not None:
        # mpirun runs on rank 0's host, and passes that host's SM_CURRENT_HOST to all ranks.
        host, port, variable = current, SM_PORT, SM_CURRENT
    else:
        uri = environment.text(environ, _OPEN_MPI_URI)
        hostfile = environment.text(environ, _OPEN_MPI_HOSTFILE) or ""
        if uri is None or environment.first_set(environ, *_PODS) is not None or hostfile.startswith(_MPIJOB):
            return None
        parts = _URI.fullmatch(uri)
        host = "" if parts is None else parts[2] or parts[3]
        if parts is None or host_problem(host) is not None:
            raise refused(_OPEN_MPI_URI, uri, "as 1531576320.0;tcp://10.96.0.1:34911", f"Set {ADDRESS}.")
        port, variable = derived_port(int(parts[1]) // 4096), _OPEN_MPI_URI  # jobs count by 4096
    port, port_from = chosen_port(environ, port, "")
    return join(host, port), ", ".join(filter(None, (variable, port_from)))


_HOST, _PORT, _AGENT = "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"
_PET_NODES, _PET_RANK, _PET_HOST, _PET_PORT = "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"
_DEEPSPEED_LOCAL_COUNT = "LOCAL_SIZE"
_TORCH_PORT = 29500  # torchrun's own
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def torchrun(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Args:
        environ: the environment. torchrun sets these variables for each process, with LOCAL_RANK and LOCAL_WORLD_SIZE;
            DeepSpeed's launcher with LOCAL_RANK and LOCAL_SIZE; Azure ML with LOCAL_RANK alone; PyTorchJob for each pod.

    Process 0 has MASTER_PORT, or under torchrun, which
    listens there itself, a port that follows from it. Several ranks of a host take one GPU each, in order. It does not
    apply to one process; one that srun has started with others is refused.

    Kubeflow Trainer sets PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT for torchrun; a program started
    there without torchrun is one process on each node, with all its GPUs.

    Example:
        >>> torchrun({"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2"})
        ClusterSpec(worker 2, process 2 of 3; cluster: 3 worker; from torchrun)

    Source: PyTorch, "torchrun", "Environment variables"; kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go;
    kubeflow/trainer, pkg/runtime/framework/plugins/torch; deepspeed/launcher/launch.py; Azure ML, "Distributed GPU training
    guide", "Process initialization".
    """

    text = functools.partial(environment.text, environ)
    count_from, rank_from, local_count_from, local_rank_from = TORCHRUN.sets
    if text(local_rank_from) is None and text(_PET_RANK) is not None:  # RANK is then a node's as well
        coordinator = environment.address(environ, ADDRESS) or _torch_address(environ, _PET_HOST, _PET_PORT)
        return counted(environ, "torchrun", coordinator, (_PET_HOST, _PET_NODES, _PET_RANK))
    # Scripts set all but the rank for a whole job, and something else starts its tasks.
    if any(environment.first_set(environ, *each) is None for each in ((rank_from, _AGENT), (count_from, _HOST))):
        return None
    if text(count_from) == "1":
        tasks = environ.get(environment.first_set(environ, *COUNTS) or "", "1").strip()
        if text(_AGENT) is not None and text(NODES) is not None and tasks != "1":
            mend = (
                f"Give torchrun --nnodes={tasks} and --rdzv-endpoint=HOST:PORT, or start python by srun without it. To train "
                f"apart in each, use another strategy (mirrored), or unset {NODES}."
            )
            raise refused(count_from, 1, f"{tasks} or more here, as srun has started torchrun {tasks} times", mend)
        return None
    if not TORCHRUN.has_started(environ):
        return None
    if text(local_count_from) is None and (ranks_here := text(_DEEPSPEED_LOCAL_COUNT)) is not None:
        environ = {**environ, local_count_from: ranks_here}
    return _ranked(environ, TORCHRUN, _torch_rank_0)


def _torch_rank_0(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Finds the address of process 0 and its variables; None if they are not set."""
    if (address := _torch_address(environ, _HOST, _PORT)) is None:
        return None
    local_count = environment.text(environ, TORCHRUN.sets.local_number)
    if split(address)[0] in _LOOPBACK and local_count is not None:
        count = environ[TORCHRUN.sets.number]
        allowed = f"an address that all hosts reach, as {local_count} of the {count} ranks are on this one"
        raise refused(_HOST, environ[_HOST], allowed, "Give torchrun --master-addr, the name of the first host.")
    return address, f"{_HOST}, {_PORT}"


def _torch_address(environ: Mapping[str, str], host_variable: str, port_variable: str) -> str | None:
    """Reads the address of process 0; None if its host is not set."""
    host = environment.host(environ, host_variable)
    if host is None:
        return None
    port = environment.port(environ, port_variable) or _TORCH_PORT
    torchrun_listens = environment.text(environ, _AGENT) is not None
    own_port, _ = chosen_port(environ, derived_port(port) if torchrun_listens else port, port_variable)
    return join(host, own_port)


def submitit(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads the variables of submitit's local executor: all tasks are on this host, and each of several takes one GPU.

    Args:
        environ: the environment, with the SUBMITIT_LOCAL_ variables. Under submitit's Slurm executor srun's count.

    Example:
        >>> submitit({
        ...     "SUBMITIT_LOCAL_JOB_ID": "4711", "SUBMITIT_LOCAL_NTASKS": "2",
        ...     "SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_LOCALID": "1",
        ... })
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from submitit)

    Source: submitit/local/local.py, `Controller.start_tasks`.
    """
    # The executor's own process has the number of tasks alone.
    if environment.first_set(environ, SUBMITIT.sets.rank, SUBMITIT.sets.local_rank, *SUBMITIT.jobs) is None:
        return None
    return _ranked(environ, SUBMITIT)


def _ranked(
    environ: Mapping[str, str],
    launcher: Launcher,
    find_rank_0: Callable[[Mapping[str, str]], tuple[str, str] | None] = lambda environ: None,
) -> ClusterSpec:
    """Makes the spec of a rank; `find_rank_0` finds the address of process 0 on several hosts, and its variables."""
    sets, mend = launcher.sets, launcher.mend
    count = environment.needed(environ, sets.number, mend, least=1, most=MOST)
    index = environment.index(environ, sets.rank, count, sets.number, mend)
    read = environment.needed if launcher.needs_local else environment.number
    local_count = read(environ, sets.local_number, mend, least=1)
    if local_count is None:
        local_index = environment.number(environ, sets.local_rank, mend)
    elif local_count > count:
        raise refused(sets.local_number, local_count, f"at most {count}, the number of all ranks", mend)
    else:
        local_index = environment.index(environ, sets.local_rank, local_count, sets.local_number, mend)
    if environment.address(environ, ADDRESS) is not None:  # it replaces the address below
        coordinator, sources = None, (sets.number,)
    elif local_count == count:
        job = environment.first_set(environ, *launcher.jobs) or ""
        port, port_from = chosen_port(environ, derived_port(environ.get(job, "")), job)
        coordinator, sources = join("localhost", port), (sets.local_number, port_from, sets.number)
    elif (rank_0 := find_rank_0(environ)) is not None:
        coordinator, sources = rank_0[0], (rank_0[1], sets.number)
    else:
        why = f"the ranks are on several hosts and {launcher.name} does not tell which is rank 0's"
        allowed = f"the address of rank 0, host:port, as {why}"
        raise refused(ADDRESS, None, allowed, f"Say where rank 0 runs: {launcher.command}.")
    addresses, jobs_from = chosen_coordinator(environ, [coordinator] + [None] * (count - 1), *sources)
    gpus = _one_gpu(environ, launcher, local_count, local_index)
    return workers_spec(environ, launcher.resolver, addresses, index, (jobs_from, sets.number, sets.rank), gpus)


def _one_gpu(environ: Mapping[str, str], launcher: Launcher, local_count: int | None, local_index: int | None) -> Gpus:
    """Chooses one GPU for each of several ranks of a host; all that a rank sees, if it is alone or sees its own."""
    sets = launcher.sets
    if local_index is None or local_count == 1:
        return None, None
    visible = environment.first_set(environ, *VISIBLE)
    if visible is not None and not (launcher.shows_all and len(environ[visible].split(",")) >= (local_count or 2)):
        return None, None
    if local_count is None and environment.text(environ, DEVICES) is None:
        why = f"{sets.local_rank} alone does not tell whether a rank has all GPUs of its host or one of them"
        mend = f"Set it, or {DEVICES} to the indices of each rank's GPUs."
        raise refused(sets.local_number, None, f"the number of ranks on this host: {why}", mend)
    return (local_index,), sets.local_rank
