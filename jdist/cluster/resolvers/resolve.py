"""The cluster of this process: from the first resolver that applies, or from arguments.

Signs of several processes without their addresses are refused: each would train alone on all data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from jdist.cluster import environment
from jdist.cluster.address import refused
from jdist.cluster.resolvers.host_lists import LSF_HOSTS, lsf, lsf_slots, sagemaker, skypilot
from jdist.cluster.resolvers.jax_env import ADDRESS, COUNT, INDEX, jax_env
from jdist.cluster.resolvers.launchers import mpi, open_mpi, submitit, torchrun
from jdist.cluster.resolvers.pods import COMPLETION_INDEX, POD, kubernetes, leader_worker_set, tpu
from jdist.cluster.resolvers.slurm import HET_SIZE, NODES, RANK, slurm
from jdist.cluster.resolvers.tf_config import tf_config, vertex
from jdist.cluster.spec import ClusterSpec

Resolver = Callable[[Mapping[str, str]], ClusterSpec | None]
"""A pure function of an environment: the cluster that it describes, None if its platform is not there.

It raises a `ClusterConfigError` if variables are missing, hold something else or contradict each other. Those that are named
after a platform return workers alone, unless they say so; of their addresses only process 0's may be known.
"""

_ALONE = "To train in one process on its own, use another strategy (mirrored), or unset the variable."
_ALL = f"{ADDRESS}, {COUNT} and {INDEX}"
_MPIJOB = (
    "In an MPIJob the launcher's pod starts it: run mpirun -x JAX_COORDINATOR_ADDRESS=JOB-worker-0.JOB:PORT there."
)
_SRUN = (
    f"srun did not start this process, as {RANK} or {NODES} is not set: start every process by `srun jdist run ...` or "
    "`srun python ...`."
)
_SLICE = f"A TPU slice's hosts are in TPU_WORKER_HOSTNAMES: set it, or {_ALL} as configs/cluster/cloud_tpu.sh does."
# A variable, its value for a single process (None: unset), the remedy. The first that is set counts.
_OF_SEVERAL = (
    ("PMI_ID", None, f"Here hydra tells the rank alone: set {_ALL} for each, {INDEX} to $PMI_ID."),
    ("LSF_PM_TASKID", "1", f"LSF lists a job's hosts in {LSF_HOSTS}: set it, or {_ALL}."),
    ("PET_NNODES", "1", f"Start the program by torchrun, which sets RANK and WORLD_SIZE, or set {_ALL}."),
    ("AWS_BATCH_JOB_NUM_NODES", "1", f"AWS Batch tells where node 0 is to the other nodes alone: set {_ALL}."),
    ("HOROVOD_SIZE", "1", f"Horovod tells no address that JAX can use: set {_ALL}, {INDEX} to $HOROVOD_RANK."),
    ("VC_TASK_INDEX", "0", f"Volcano lists the hosts of each task apart: set {_ALL}."),
    ("PMIX_RANK", "0", f"PMIx is read by MPI programs alone: set {_ALL}."),
    ("PBS_NODENUM", "0", f"PBS lists a job's hosts in a file: set {_ALL}."),
    ("RANK", "0", f"torchrun sets it together with WORLD_SIZE and MASTER_ADDR: set all, or {_ALL}."),
    ("LOCAL_WORLD_SIZE", "1", f"torchrun sets it together with RANK and WORLD_SIZE: set all, or {_ALL}."),
    ("MEGASCALE_NUM_SLICES", "1", _SLICE),
    ("MEGASCALE_COORDINATOR_ADDRESS", None, _SLICE),
    ("TPU_WORKER_ID", "0", _SLICE),
    ("CLOUD_TPU_TASK_ID", "0", f"A TPU's processes are listed in TPU_PROCESS_ADDRESSES: set it, or {_ALL}."),
)
_FOR_SEVERAL = (
    ("K_MPI_JOB_ROLE", None, _MPIJOB),
    (HET_SIZE, "1", f"Start every process by srun, and set {_ALL} there: {INDEX} to $SLURM_PROCID."),
    ("SLURM_STEP_NUM_TASKS", "1", _SRUN),
    ("SLURM_NTASKS", "1", _SRUN),
    ("SLURM_JOB_NUM_NODES", "1", _SRUN),
    ("SLURM_NNODES", "1", _SRUN),
    ("SLURM_NTASKS_PER_NODE", "1", _SRUN),
    ("PBS_NUM_NODES", "1", f"Start a process on each node by mpirun or pbsdsh, with {_ALL}."),
    ("WORLD_SIZE", "1", f"torchrun sets it together with RANK and MASTER_ADDR: set all, or {_ALL}."),
)


def unplaced(environ: Mapping[str, str]) -> None:
    """Refuses an environment that names this process as one of several, without their addresses."""
    # For example a rank without the number of ranks, a node of torchrun or a host of a TPU without
    # the others.
    _refuse_first(environ, _OF_SEVERAL)


def allocation(environ: Mapping[str, str]) -> None:
    """Refuses a process outside the job, in an environment with room for several processes."""
    # It does not concern a strategy of one process, as in a notebook of an allocation. It finds a
    # coordinator's address alone, a pod of an Indexed Job without more variables or of an MPIJob
    # outside mpirun, and an allocation of Slurm or LSF outside srun and blaunch.
    if (address := environment.text(environ, ADDRESS)) is not None:
        raise refused(ADDRESS, address, f"set together with {COUNT} and {INDEX}", "Set all three, or none.")
    index = environment.text(environ, COMPLETION_INDEX)
    if index is not None and environment.text(environ, POD) is not None:
        mend = f"Set {ADDRESS} and {COUNT} in the manifest, as configs/cluster/jobset.yaml does. {_ALONE}"
        raise refused(COMPLETION_INDEX, index, f"set together with {ADDRESS} and {COUNT}", mend)
    _refuse_first(environ, _FOR_SEVERAL)
    listed = environment.text(environ, LSF_HOSTS)
    if listed is not None and len(lsf_slots(listed)) > 1:
        start = f"Start one process on each host by blaunch, or by jsrun or mpirun. {_ALONE}"
        raise refused(LSF_HOSTS, listed, "one host here", start)


def _refuse_first(environ: Mapping[str, str], signs: tuple[tuple[str, str | None, str], ...]) -> None:
    for variable, alone, mend in signs:
        value = environment.text(environ, variable)
        if value is not None and value != alone:
            raise refused(variable, value, "unset here" if alone is None else f"{alone} here", f"{mend} {_ALONE}")


# First what was written for this job, then what a launcher sets for each process, then what a
# platform sets on its hosts. mpirun in a Slurm allocation starts its helpers by srun, one task a
# node, and its ranks inherit their variables.
STARTED: tuple[Resolver, ...] = (
    tf_config,
    kubernetes,
    jax_env,
    torchrun,
    open_mpi,
    mpi,
    submitit,
    vertex,
    sagemaker,
    tpu,
    leader_worker_set,
    skypilot,
    slurm,
    lsf,
    unplaced,
)
DEFAULT: tuple[Resolver, ...] = (*STARTED, allocation)


def resolve(environ: Mapping[str, str] | None = None, resolvers: Sequence[Resolver] = DEFAULT) -> ClusterSpec:
    """Finds the cluster of this process in its environment.

    Args:
        environ: the environment; None: this process's.
        resolvers: the resolvers to try, in order; the first that applies counts.

    Returns:
        The spec; its `resolver`, `origins` and `describe()` tell where it is from. If no resolver applies, this process
        alone.

    Raises:
        ClusterConfigError: the first resolver that applies cannot make sense of the environment, or several processes were
            started and the environment does not tell where they are.

    Example:
        >>> resolve({"JAX_COORDINATOR_ADDRESS": "a:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"})
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from jax_env)
        >>> resolve({}).num_processes
        1
    """
    environ = os.environ if environ is None else environ
    for resolver in resolvers:
        spec = resolver(environ)
        if spec is not None:
            return spec
    return ClusterSpec(jobs={"worker": (None,)}, task_type="worker", task_index=0, resolver="nothing (one process)")


def simple(
    *,
    jobs: Mapping[str, Sequence[str | None]],
    task_type: str,
    task_index: int,
    local_device_ids: Sequence[int] | None = None,
) -> ClusterSpec:
    """Makes a spec from arguments; does not read the environment.

    Args:
        jobs: for each of "chief", "worker", "ps", "evaluator" the tasks' addresses, "host:port".
        task_type: this process's job.
        task_index: its place in that job, from 0.
        local_device_ids: which of the visible GPUs this process takes; None: all.

    Raises:
        ClusterConfigError: see `ClusterSpec`.

    Example:
        >>> simple(jobs={"worker": ["a:2222", "b:2222"]}, task_type="worker", task_index=1)
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from simple)
    """
    return ClusterSpec(
        jobs=jobs,  # type: ignore[arg-type]  # ClusterSpec makes tuples of the lists, and refuses what is neither
        task_type=task_type,
        task_index=task_index,
        resolver="simple",
        origins={name: f"`{name}`" for name in ("jobs", "task_type", "task_index", "local_device_ids")},
        local_device_ids=None if local_device_ids is None else tuple(local_device_ids),
    )


def union(*parts: Resolver | ClusterSpec) -> Resolver:
    """Joins the clusters of several resolvers, as tf.distribute's UnionResolver does.

    The first part that applies tells which task this process is, and which GPUs it takes. A job that several parts name has
    the tasks of all, in the parts' order; parts with the same addresses in the same order count once.

    Args:
        parts: resolvers, or specs; resolvers that do not apply are passed over.

    Returns:
        The resolver. It returns None if no part applies, and raises ClusterConfigError if parts contradict each other, as
        by two chiefs, or one address for two tasks.

    Example:
        >>> from jdist.cluster import simple, tf_config
        >>> servers = simple(jobs={"ps": ["p:2222"]}, task_type="ps", task_index=0)
        >>> config = '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 1}}'
        >>> union(tf_config, servers)({"TF_CONFIG": config})
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker, 1 ps; from union(tf_config, simple))
    """

    def joined(environ: Mapping[str, str]) -> ClusterSpec | None:
        all_specs = [part if isinstance(part, ClusterSpec) else part(environ) for part in parts]
        specs = [spec for spec in all_specs if spec is not None]
        if not specs:
            return None
        jobs: dict[str, list[tuple[str | None, ...]]] = {}
        for spec in specs:
            for name, addresses in spec.jobs.items():
                named = jobs.setdefault(name, [])
                if addresses not in named:
                    named.append(addresses)
        sources = [spec.origins.get("jobs") or spec.resolver for spec in specs]
        return ClusterSpec(
            jobs={name: sum(named, ()) for name, named in jobs.items()},
            task_type=specs[0].task_type,
            task_index=specs[0].task_index,
            resolver=f"union({', '.join(spec.resolver for spec in specs)})",
            origins={**specs[0].origins, "jobs": ", ".join(dict.fromkeys(sources))},
            local_device_ids=specs[0].local_device_ids,
        )

    return joined
