"""The cluster of a program that an MPI launcher other than Open MPI's started: a table of their variables."""

from __future__ import annotations

from collections.abc import Mapping

from jdist.cluster import environment
from jdist.cluster.resolvers.ranks import Launcher, ranked
from jdist.cluster.spec import ClusterSpec

_BATCH_JOBS = ("PBS_JOBID", "LSB_JOBID", "SLURM_JOB_ID")

_FLUX_NODES = "FLUX_JOB_NNODES"
FLUX = Launcher(
    name="Flux",
    resolver="mpi",
    count="FLUX_JOB_SIZE",
    rank="FLUX_TASK_RANK",
    local_count=f"FLUX_JOB_SIZE / {_FLUX_NODES}",  # no variable of its own
    local_rank="FLUX_TASK_LOCAL_ID",
    jobs=("FLUX_JOB_ID",),
    command="flux run --env=JAX_COORDINATOR_ADDRESS=HOST:PORT",
)
# Which is there, is told by the variable of the rank; the first one counts. MVAPICH2, PALS and Flux set some of hydra's, too.
LAUNCHERS = (
    FLUX,
    Launcher(
        name="MVAPICH2's mpirun_rsh",
        resolver="mpi",
        count="MV2_COMM_WORLD_SIZE",
        rank="MV2_COMM_WORLD_RANK",
        local_count="MV2_COMM_WORLD_LOCAL_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        jobs=_BATCH_JOBS,
        command="mpirun_rsh ... JAX_COORDINATOR_ADDRESS=HOST:PORT python train.py",
    ),
    Launcher(
        name="PALS' mpiexec",
        resolver="mpi",
        count="PMI_SIZE",
        rank="PALS_RANKID",
        local_count="PALS_LOCAL_SIZE",
        local_rank="PALS_LOCAL_RANKID",
        jobs=("PALS_APID", *_BATCH_JOBS),
        command="mpiexec --env JAX_COORDINATOR_ADDRESS=HOST:PORT",
    ),
    Launcher(
        name="LSF's jsrun",
        resolver="mpi",
        count="JSM_NAMESPACE_SIZE",
        rank="JSM_NAMESPACE_RANK",
        local_count="JSM_NAMESPACE_LOCAL_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        jobs=_BATCH_JOBS,
        command="jsrun -E JAX_COORDINATOR_ADDRESS=HOST:PORT",
    ),
    Launcher(
        name="hydra, the mpiexec of MPICH and Intel MPI",
        resolver="mpi",
        count="PMI_SIZE",
        rank="PMI_RANK",
        local_count="MPI_LOCALNRANKS",
        local_rank="MPI_LOCALRANKID",
        jobs=_BATCH_JOBS,
        command="mpiexec -genv JAX_COORDINATOR_ADDRESS HOST:PORT",
    ),
)


def mpi(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Read this process's rank and how many there are, as hydra (MPICH, Intel MPI), MVAPICH2, PALS, jsrun and Flux tell them.

    None of them tells where rank 0 runs. When all ranks are on one host, that is localhost; else say where it is, by
    JAX_COORDINATOR_ADDRESS. Several ranks of a host share its GPUs as under Open MPI.

    Args:
        environ: the environment.

    Returns:
        The spec, with workers alone; the addresses of all but process 0 are not known. None if none of them started this,
        if there is one rank, or if Slurm's srun started it and the variables agree with its own.

    Raises:
        ClusterConfigError: a number is missing or is none, or process 0's host is not known.

    Example:
        >>> mpi({
        ...     "PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1",
        ...     "JAX_COORDINATOR_ADDRESS": "node1:7000",
        ... })
        ClusterSpec(worker 3, process 3 of 4; cluster: 4 worker; from mpi)

    Source: MPICH, "Hydra process manager"; MVAPICH2, mpispawn.c; ALCF, "Running jobs on Aurora"; IBM, "jsrun";
    flux-environment(7).
    """
    launcher = next((each for each in LAUNCHERS if environment.text(environ, each.rank) is not None), None)
    if launcher is None:
        launcher = next(
            (each for each in reversed(LAUNCHERS) if environment.text(environ, each.count) is not None), None
        )
    if launcher is None or environment.text(environ, launcher.count) == "1" or not launcher.is_there(environ):
        return None
    return ranked(_with_local_count(environ) if launcher is FLUX else environ, launcher)


def _with_local_count(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment with the ranks of each node, where all nodes of a job of Flux's have as many."""
    ranks, nodes = (environment.number(environ, name, FLUX.mend, least=1) for name in (FLUX.count, _FLUX_NODES))
    if ranks is None or nodes is None or ranks % nodes != 0:
        return environ
    return {**environ, FLUX.local_count: str(ranks // nodes)}
