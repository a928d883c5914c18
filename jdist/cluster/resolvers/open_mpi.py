"""The cluster of a program that Open MPI's mpirun started: OMPI_COMM_WORLD_*."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jdist.cluster import environment
from jdist.cluster.address import host_problem, join, refused
from jdist.cluster.resolvers import sagemaker
from jdist.cluster.resolvers.jax_env import ADDRESS, chosen_port, derived_port
from jdist.cluster.resolvers.ranks import Launcher, ranked
from jdist.cluster.spec import ClusterSpec

LAUNCHER = "OMPI_MCA_orte_hnp_uri"
HOSTFILE = "OMPI_MCA_orte_default_hostfile"
OPEN_MPI = Launcher(
    name="Open MPI's mpirun",
    resolver="open_mpi",
    count="OMPI_COMM_WORLD_SIZE",
    rank="OMPI_COMM_WORLD_RANK",
    local_count="OMPI_COMM_WORLD_LOCAL_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    jobs=("PMIX_NAMESPACE", LAUNCHER),
    command="mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT",
    needs_local=True,
)
_MPIJOB = "/etc/mpi/"  # where Kubeflow's MPI operator puts the list of hosts, which mpirun hands on to all ranks
_URI = re.compile(r"([0-9]{1,18})\.[0-9]+;tcp(?:://([^,:]+)|6://\[([^,\]]+)).*", re.DOTALL)


def open_mpi(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Read this process's rank, how many there are, and where mpirun runs.

    Process 0 must be found by the others. When all ranks are on one host, that is localhost. Else mpirun up to version
    4 says on which host it runs itself, and rank 0 is taken to be there; on SageMaker it is on the host whose
    SM_CURRENT_HOST mpirun hands on. In a Kubeflow MPIJob mpirun runs in a pod of its own, so there, with version 5, or if
    rank 0 runs elsewhere, say where it is: `mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT ...`.

    Several ranks of a host take one GPU each, in order. Where CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES is set, each
    rank takes all that it sees; a rank alone on its host takes all GPUs.

    Args:
        environ: the environment.

    Returns:
        The spec, with workers alone; the addresses of all but process 0 are not known. None if mpirun did not start this,
        or if Slurm's srun did and the variables agree with its own.

    Raises:
        ClusterConfigError: a number is missing or is none, or process 0's host is not known.

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
    return ranked(environ, OPEN_MPI, lambda: _launcher(environ))


def _launcher(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The address of process 0 on the host where mpirun runs, and the variable with that host; None where it is elsewhere."""
    master = environment.text(environ, sagemaker.CURRENT)
    if environment.text(environ, sagemaker.HOSTS) is not None and master is not None:
        return sagemaker.first_of_ranks(environ, master)
    uri = environment.text(environ, LAUNCHER)
    if uri is None or (environment.text(environ, HOSTFILE) or "").startswith(_MPIJOB):
        return None
    parts = _URI.fullmatch(uri)
    host = "" if parts is None else parts[2] or parts[3]
    if parts is None or host_problem(host) is not None:
        raise refused(LAUNCHER, uri, "as 1531576320.0;tcp://10.96.0.1:34911", f"Set {ADDRESS}.")
    port, port_from = chosen_port(environ, derived_port(int(parts[1]) // 4096), LAUNCHER)  # jobs count by 4096
    return join(host, port), LAUNCHER if port_from == LAUNCHER else f"{LAUNCHER}, {port_from}"
