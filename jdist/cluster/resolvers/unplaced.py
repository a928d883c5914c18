"""Signs of several processes whose cluster cannot be found: better refused than trained apart."""

from __future__ import annotations

from collections.abc import Mapping

from jdist.cluster import environment
from jdist.cluster.address import refused
from jdist.cluster.resolvers.jax_env import ADDRESS, COUNT, INDEX
from jdist.cluster.resolvers.kubernetes import COMPLETION_INDEX, POD
from jdist.cluster.resolvers.lsf import HOSTS as LSF_HOSTS
from jdist.cluster.resolvers.lsf import hosts_of
from jdist.cluster.resolvers.slurm import HET_SIZE, NODES

_ALONE = "To train in one process on its own, use another strategy (mirrored), or unset the variable."
_ALL = f"{ADDRESS}, {COUNT} and {INDEX}"
_SRUN = f"Start every process by srun, which also sets {NODES}. {_ALONE}"
_SLICE = (
    f"A TPU slice's hosts are in TPU_WORKER_HOSTNAMES: set it, or {_ALL} as configs/cluster/cloud_tpu.sh does. {_ALONE}"
)
# A variable, what it holds where one process was started (None: it is not set then), and what to write. The first counts.
_OF_SEVERAL = (
    ("PMI_ID", None, f"Here hydra tells the rank alone: set {_ALL} for each, {INDEX} to $PMI_ID. {_ALONE}"),
    ("LSF_PM_TASKID", "1", f"LSF lists a job's hosts in {LSF_HOSTS}: set it, or {_ALL}. {_ALONE}"),
    ("PET_NNODES", "1", f"Start the program by torchrun, which sets RANK and WORLD_SIZE, or set {_ALL}. {_ALONE}"),
    ("AWS_BATCH_JOB_NUM_NODES", "1", f"AWS Batch tells where node 0 is to the other nodes alone: set {_ALL}. {_ALONE}"),
    ("HOROVOD_SIZE", "1", f"Horovod tells no address that JAX can use: set {_ALL}, {INDEX} to $HOROVOD_RANK. {_ALONE}"),
    ("VC_TASK_INDEX", "0", f"Volcano lists the hosts of each task apart: set {_ALL}. {_ALONE}"),
    ("PMIX_RANK", "0", f"PMIx is read by MPI programs alone: set {_ALL}. {_ALONE}"),
    ("PBS_NODENUM", "0", f"PBS lists a job's hosts in a file: set {_ALL}. {_ALONE}"),
    ("RANK", "0", f"torchrun sets it together with WORLD_SIZE and MASTER_ADDR: set all, or {_ALL}. {_ALONE}"),
    ("LOCAL_WORLD_SIZE", "1", f"torchrun sets it together with RANK and WORLD_SIZE: set all, or {_ALL}. {_ALONE}"),
    ("MEGASCALE_NUM_SLICES", "1", _SLICE),
    ("MEGASCALE_COORDINATOR_ADDRESS", None, _SLICE),
    ("TPU_WORKER_ID", "0", _SLICE),
    ("CLOUD_TPU_TASK_ID", "0", f"A TPU's processes are listed in TPU_PROCESS_ADDRESSES: set it, or {_ALL}. {_ALONE}"),
)
_FOR_SEVERAL = (
    (
        "K_MPI_JOB_ROLE",
        None,
        "In an MPIJob mpirun starts the program: run mpirun -x JAX_COORDINATOR_ADDRESS=JOB-worker-0.JOB:PORT in the launcher's "
        f"pod. {_ALONE}",
    ),
    (HET_SIZE, "1", f"Start every process by srun, and set {_ALL} there: {INDEX} to $SLURM_PROCID. {_ALONE}"),
    ("SLURM_STEP_NUM_TASKS", "1", _SRUN),
    ("SLURM_NTASKS", "1", _SRUN),
    ("SLURM_JOB_NUM_NODES", "1", _SRUN),
    ("SLURM_NNODES", "1", _SRUN),
    ("SLURM_NTASKS_PER_NODE", "1", _SRUN),
    ("PBS_NUM_NODES", "1", f"Start a process on each node by mpirun or pbsdsh, with {_ALL}. {_ALONE}"),
    ("WORLD_SIZE", "1", f"torchrun sets it together with RANK and MASTER_ADDR: set all, or {_ALL}. {_ALONE}"),
)


def unplaced(environ: Mapping[str, str]) -> None:
    """Refuse an environment in which this process was started as one of several, and is not told where they are.

    It never finds a cluster.

    Args:
        environ: the environment.

    Raises:
        ClusterConfigError: a rank without the number of ranks; a node of torchrun's, or a host of a TPU's, without the others.
    """
    _refuse_first(environ, _OF_SEVERAL)


def allocation(environ: Mapping[str, str]) -> None:
    """Refuse an environment that has room for several processes, of which this one was not started as one.

    A strategy of one process, in a notebook of an allocation for instance, has nothing to do with it. It never finds a cluster.

    Args:
        environ: the environment.

    Raises:
        ClusterConfigError: a coordinator's address alone; a pod of an Indexed Job that is told nothing else, or of an MPIJob
            outside mpirun; an allocation of Slurm's or LSF's outside srun and blaunch.
    """
    if (found := environment.text(environ, ADDRESS)) is not None:
        raise refused(ADDRESS, found, f"set together with {COUNT} and {INDEX}", "Set all three, or none.")
    index = environment.text(environ, COMPLETION_INDEX)
    if index is not None and environment.text(environ, POD) is not None:
        mend = f"Set {ADDRESS} and {COUNT} in the manifest, as configs/cluster/jobset.yaml does. {_ALONE}"
        raise refused(COMPLETION_INDEX, index, f"set together with {ADDRESS} and {COUNT}", mend)
    _refuse_first(environ, _FOR_SEVERAL)
    listed = environment.text(environ, LSF_HOSTS)
    if listed is not None and len(hosts_of(listed)) > 1:
        raise refused(
            LSF_HOSTS,
            listed,
            "one host here",
            f"Start one process on each host by blaunch, or by jsrun or mpirun. {_ALONE}",
        )


def _refuse_first(environ: Mapping[str, str], signs: tuple[tuple[str, str | None, str], ...]) -> None:
    for variable, alone, mend in signs:
        found = environment.text(environ, variable)
        if found is not None and found != alone:
            raise refused(variable, found, "unset here" if alone is None else f"{alone} here", mend)
