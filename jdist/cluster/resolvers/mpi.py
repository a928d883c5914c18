"""The ranks of MPI launchers: Open MPI's mpirun, hydra (MPICH, Intel MPI), MVAPICH2, PALS, jsrun, Flux."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jdist.cluster import environment
from jdist.cluster.address import host_problem, join, refused
from jdist.cluster.resolvers.host_lists import SM_CURRENT, SM_HOSTS, sagemaker_rank_0
from jdist.cluster.resolvers.jax_env import ADDRESS, chosen_port, derived_port
from jdist.cluster.resolvers.ranks import Launcher, ranked
from jdist.cluster.spec import ClusterSpec

_FLUX_NODES = "FLUX_JOB_NNODES"
FLUX = Launcher(
    name="Flux",
    count="FLUX_JOB_SIZE",
    rank="FLUX_TASK_RANK",
    local_count=f"FLUX_JOB_SIZE / {_FLUX_NODES}",  # no variable of its own
    local_rank="FLUX_TASK_LOCAL_ID",
    jobs=("FLUX_JOB_ID",),
    command="flux run --env=JAX_COORDINATOR_ADDRESS=HOST:PORT",
)
# The first whose variable of the rank is set counts. MVAPICH2, PALS and Flux set some of hydra's.
LAUNCHERS = (
    FLUX,
    Launcher(
        name="MVAPICH2's mpirun_rsh",
        count="MV2_COMM_WORLD_SIZE",
        rank="MV2_COMM_WORLD_RANK",
        local_count="MV2_COMM_WORLD_LOCAL_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        command="mpirun_rsh ... JAX_COORDINATOR_ADDRESS=HOST:PORT python train.py",
    ),
    Launcher(
        name="PALS' mpiexec",
        count="PMI_SIZE",
        rank="PALS_RANKID",
        local_count="PALS_LOCAL_SIZE",
        local_rank="PALS_LOCAL_RANKID",
        jobs=("PALS_APID", "PBS_JOBID", "LSB_JOBID", "SLURM_JOB_ID"),
        command="mpiexec --env JAX_COORDINATOR_ADDRESS=HOST:PORT",
    ),
    Launcher(
        name="LSF's jsrun",
        count="JSM_NAMESPACE_SIZE",
        rank="JSM_NAMESPACE_RANK",
        local_count="JSM_NAMESPACE_LOCAL_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        command="jsrun -E JAX_COORDINATOR_ADDRESS=HOST:PORT",
    ),
    Launcher(
        name="hydra, the mpiexec of MPICH and Intel MPI",
        count="PMI_SIZE",
        rank="PMI_RANK",
        local_count="MPI_LOCALNRANKS",
        local_rank="MPI_LOCALRANKID",
        command="mpiexec -genv JAX_COORDINATOR_ADDRESS HOST:PORT",
    ),
)
_OPEN_MPI_URI = "OMPI_MCA_orte_hnp_uri"
_OPEN_MPI_HOSTFILE = "OMPI_MCA_orte_default_hostfile"
OPEN_MPI = Launcher(
    name="Open MPI's mpirun",
    resolver="open_mpi",
    count="OMPI_COMM_WORLD_SIZE",
    rank="OMPI_COMM_WORLD_RANK",
    local_count="OMPI_COMM_WORLD_LOCAL_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    jobs=("PMIX_NAMESPACE", _OPEN_MPI_URI),
    command="mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT",
    needs_local=True,
)
_MPIJOB = "/etc/mpi/"  # where Kubeflow's MPI operator puts the list of hosts, whose path mpirun passes to all ranks
# In a pod mpirun may run in one of its own, without a rank: the operator sets the last two, also with another list of hosts.
_PODS = ("KUBERNETES_SERVICE_HOST", "K_MPI_JOB_ROLE", "OMPI_MCA_orte_keep_fqdn_hostnames")
_URI = re.compile(r"([0-9]{1,18})\.[0-9]+;tcp(?:://([^,:]+)|6://\[([^,\]]+)).*", re.DOTALL)


def mpi(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads rank and number of ranks as hydra (MPICH, Intel MPI), MVAPICH2, PALS, jsrun and Flux set them.

    None of them tells where rank 0 runs. Where all ranks are on one host, that is localhost; else set
    JAX_COORDINATOR_ADDRESS. Several ranks of a host share its GPUs as under Open MPI.

    Returns:
        The spec, with workers alone; only process 0's address is known. None if none of them started this process, if there
        is one rank, or if Slurm's srun started it and the variables agree with its own.

    Raises:
        ClusterConfigError: a number is missing or is no number, or process 0's host is not known.

    Example:
        >>> mpi({
        ...     "PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1",
        ...     "JAX_COORDINATOR_ADDRESS": "node1:7000",
        ... })
        ClusterSpec(worker 3, process 3 of 4; cluster: 4 worker; from mpi)

    Source: MPICH, "Hydra process manager"; MVAPICH2, mpispawn.c; ALCF, "Running jobs on Aurora"; IBM, "jsrun";
    flux-environment(7).
    """
    by_rank = (each for each in LAUNCHERS if environment.text(environ, each.rank) is not None)
    by_count = (each for each in reversed(LAUNCHERS) if environment.text(environ, each.count) is not None)
    launcher = next(by_rank, None) or next(by_count, None)
    if launcher is None or environment.text(environ, launcher.count) == "1" or not launcher.is_there(environ):
        return None
    return ranked(_with_local_count(environ) if launcher is FLUX else environ, launcher)


def _with_local_count(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Adds the number of ranks of this node, if all nodes of a Flux job have as many."""
    ranks, nodes = (environment.number(environ, name, FLUX.mend, least=1) for name in (FLUX.count, _FLUX_NODES))
    if ranks is None or nodes is None or ranks % nodes != 0:
        return environ
    return {**environ, FLUX.local_count: str(ranks // nodes)}


def open_mpi(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads this process's rank, the number of ranks, and where mpirun runs.

    Where all ranks are on one host, rank 0 is at localhost. Else it is taken to be on mpirun's own host, which mpirun tells
    up to version 4; on SageMaker on the host whose SM_CURRENT_HOST mpirun passes on. With version 5, in a Kubeflow MPIJob
    (where mpirun has a pod of its own), or if rank 0 is elsewhere, say where:
    `mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT ...`.

    Several ranks of a host take one GPU each, in order. Where CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES is set, each
    rank takes all that it sees; a rank alone on its host takes all GPUs.

    Returns:
        The spec, with workers alone; only process 0's address is known. None if mpirun did not start this process, or if
        Slurm's srun did and the variables agree with its own.

    Raises:
        ClusterConfigError: a number is missing or is no number, or process 0's host is not known.

    Example:
        >>> open_mpi({
        ...     "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        ...     "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        ... })
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from open_mpi)

    Source: Open MPI, "Environment variables"; jax/_src/clusters/ompi_cluster.py; aws/sagemaker-training-toolkit, mpi.py;
    kubeflow/mpi-operator, pkg/controller/mpi_job_controller.go.
    """
    if not OPEN_MPI.is_there(environ):
        return None
    return ranked(environ, OPEN_MPI, lambda: _mpirun_address(environ))


def _mpirun_address(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Finds the address of process 0 on mpirun's host, and its variables; None where process 0 is elsewhere."""
    current = environment.text(environ, SM_CURRENT)
    if environment.text(environ, SM_HOSTS) is not None and current is not None:
        return sagemaker_rank_0(environ, current)
    uri = environment.text(environ, _OPEN_MPI_URI)
    in_pods = any(environment.text(environ, name) is not None for name in _PODS)
    if uri is None or in_pods or (environment.text(environ, _OPEN_MPI_HOSTFILE) or "").startswith(_MPIJOB):
        return None
    parts = _URI.fullmatch(uri)
    host = "" if parts is None else parts[2] or parts[3]
    if parts is None or host_problem(host) is not None:
        raise refused(_OPEN_MPI_URI, uri, "as 1531576320.0;tcp://10.96.0.1:34911", f"Set {ADDRESS}.")
    port, port_from = chosen_port(environ, derived_port(int(parts[1]) // 4096), _OPEN_MPI_URI)  # jobs count by 4096
    return join(host, port), _OPEN_MPI_URI if port_from == _OPEN_MPI_URI else f"{_OPEN_MPI_URI}, {port_from}"
