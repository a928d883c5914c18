"""Pods of Kubernetes, and hosts of a Cloud TPU slice, which GKE runs as pods.

Reads the variables of Jobs, JobSets, LeaderWorkerSets, Kubeflow's Trainer and JAXJobs, and of TPU slices
(TPU_WORKER_HOSTNAMES, TPU_WORKER_ID, MEGASCALE_*). A TFJob sets TF_CONFIG, a PyTorchJob the variables of `torchrun`.
"""

from __future__ import annotations

from collections.abc import Mapping

from jdist.cluster import environment
from jdist.cluster.address import host_problem, join, refused
from jdist.cluster.resolvers.jax_env import (
    ADDRESS,
    COUNT,
    INDEX,
    chosen_coordinator,
    chosen_port,
    counted,
    workers_spec,
)
from jdist.cluster.spec import ClusterSpec

POD = "KUBERNETES_SERVICE_HOST"  # set in every pod
COMPLETION_INDEX = "JOB_COMPLETION_INDEX"  # set in every pod of an Indexed Job
LEADER, GROUP_SIZE, WORKER = "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"
LEADER_PORT = 2223  # any free port: a pod has its own network address
_HOST, _PORT, _COUNT, _INDEX = "COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID"
TPU_HOSTS = "TPU_WORKER_HOSTNAMES"
TPU_ADDRESSES = "TPU_PROCESS_ADDRESSES"
TPU_INDEX = "TPU_WORKER_ID"
TASK = "CLOUD_TPU_TASK_ID"
FIRST, SLICES, SLICE = "MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"
TPU_PORT = 8482  # JAX's own choice on TPUs
_MEND = "GKE sets the variables of a slice on all its hosts; set them all, or none."
_MEND_SLICES = f"Set {FIRST}, {SLICES} and {SLICE} together on every host."


def kubernetes(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads the variables of a pod.

    Args:
        environ: the environment of the pod. Kubernetes' API is not asked, so no service account needs rights.

    - Kubeflow Trainer, with a runtime of policy `jax`, sets JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
      JAX_PROCESS_ID.
    - In a JobSet, or an Indexed Job with a headless service, the manifest sets JAX_COORDINATOR_ADDRESS and
      JAX_NUM_PROCESSES (configs/cluster/jobset.yaml), and Kubernetes JOB_COMPLETION_INDEX; in a LeaderWorkerSet
      LWS_WORKER_INDEX. JAX_PROCESS_ID, if set, is used instead of either index.
    - A JAXJob of Kubeflow's training operator has COORDINATOR_ADDRESS, COORDINATOR_PORT, NUM_PROCESSES and PROCESS_ID.

    Example:
        >>> kubernetes({
        ...     "KUBERNETES_SERVICE_HOST": "10.0.0.1", "JAX_COORDINATOR_ADDRESS": "train-workers-0-0.train:1234",
        ...     "JAX_NUM_PROCESSES": "2", "JOB_COMPLETION_INDEX": "1",
        ... })
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from kubernetes)

    Source: kubeflow/trainer, pkg/runtime/framework/plugins/jax; kubeflow/training-operator, pkg/controller.v1/jax;
    Kubernetes, "Indexed Job for parallel processing with static work assignment".
    """
    if environment.text(environ, POD) is None:
        return None
    if environment.first_set(environ, COUNT, INDEX) is not None:
        index = environment.first_set(environ, INDEX, COMPLETION_INDEX, WORKER) or INDEX
        return counted(environ, "kubernetes", environment.address(environ, ADDRESS), (ADDRESS, COUNT, index))
    if any(environment.text(environ, name) is None for name in (_HOST, _PORT, _COUNT, _INDEX)):
        return None
    coordinator = join(environment.host(environ, _HOST) or "", environment.port(environ, _PORT) or 0)
    return counted(environ, "kubernetes", coordinator, (_HOST, _COUNT, _INDEX))


def leader_worker_set(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads the group of a LeaderWorkerSet's pod, which is a job: one process in each pod, the leader first.

    Args:
        environ: the environment of the pod. The resolver does not apply to a pod that is alone in its group.

    Example:
        >>> leader_worker_set({
        ...     "LWS_LEADER_ADDRESS": "train-0.train.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3",
        ... })
        ClusterSpec(worker 3, process 3 of 4; cluster: 4 worker; from leader_worker_set)

    Source: kubernetes-sigs/lws, api/leaderworkerset/v1/leaderworkerset_types.go.
    """
    if environment.text(environ, GROUP_SIZE) == "1" or environment.first_set(environ, GROUP_SIZE, WORKER) is None:
        return None
    coordinator = environment.address(environ, ADDRESS)
    if coordinator is None and (leader := environment.host(environ, LEADER)) is not None:
        coordinator = join(leader, chosen_port(environ, LEADER_PORT, "")[0])
    return counted(environ, "leader_worker_set", coordinator, (LEADER, GROUP_SIZE, WORKER))


def tpu(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads the hosts of a TPU slice and this process's place among them.

    Args:
        environ: the environment. GKE sets TPU_WORKER_HOSTNAMES and TPU_WORKER_ID in every pod that asks for TPUs: one
            process on each host. Several processes on a host, each with chips of its own, are in TPU_PROCESS_ADDRESSES and
            CLOUD_TPU_TASK_ID. Of several slices (multislice) GKE also sets MEGASCALE_COORDINATOR_ADDRESS,
            MEGASCALE_NUM_SLICES and MEGASCALE_SLICE_ID; their processes are numbered slice by slice.
            In one slice, MEGASCALE_COORDINATOR_ADDRESS may be set alone; it then names process 0's host.

    On a Cloud TPU VM only the metadata server knows the hosts, and a resolver opens no connection:
    configs/cluster/cloud_tpu.sh asks that server, and sets the variables of `jax_env`. The chips of a host, and their
    wiring, are left to JAX.

    Example:
        >>> tpu({"TPU_WORKER_HOSTNAMES": "t-0.tpu,t-1.tpu", "TPU_WORKER_ID": "1"})
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from tpu)

    Source: jax/_src/clusters/cloud_tpu_cluster.py; GKE, "Deploy TPU multislices".
    """
    variable = environment.first_set(environ, TPU_ADDRESSES, TPU_HOSTS)
    if variable is None:
        return None
    listed = environ[variable].strip()
    if listed == "localhost" and environment.text(environ, TPU_INDEX) is None:
        # Set by jdist/strategies/absent_plugins.py to keep libtpu quiet without a TPU; GKE sets an index, too.
        return None
    entries = [_split(entry.strip(), variable) for entry in listed.split(",")]
    for i, entry in enumerate(entries):
        if entry in entries[:i] or (variable == TPU_HOSTS and entry[0] in [host for host, _ in entries[:i]]):
            raise refused(variable, entry[0], "there once only", _MEND, field=f"[{i}]")
    hosts = [host for host, _ in entries]
    has_task = variable == TPU_ADDRESSES and environment.text(environ, TASK) is not None
    index, index_from = 0, TASK if has_task else TPU_INDEX
    if len(hosts) > 1 or environment.text(environ, index_from) is not None:
        index = environment.index(environ, index_from, len(hosts), variable, _MEND)
    port, port_from = chosen_port(environ, _free_port(entries), "")
    slices, own_slice = _slices(environ)
    processes: list[str | None] = [None] * (slices * len(hosts))
    processes[own_slice * len(hosts) : (own_slice + 1) * len(hosts)] = [
        join(host, port + 2 * hosts[:i].count(host)) for i, host in enumerate(hosts)
    ]
    sources = [variable]
    if slices > 1 or (environment.text(environ, SLICES) is None and environment.text(environ, FIRST) is not None):
        processes[0] = join(_first_host(environ), port)
        sources += [FIRST, SLICES] if slices > 1 else [FIRST]
    addresses, jobs_from = chosen_coordinator(environ, processes, *sources, port_from)
    index_from = index_from if slices == 1 else f"{SLICE}, {index_from}"
    return workers_spec(environ, "tpu", addresses, own_slice * len(hosts) + index, (jobs_from, variable, index_from))


def _split(entry: str, variable: str) -> tuple[str, int | None]:
    """Splits an entry into its host and its port, which those of TPU_PROCESS_ADDRESSES have."""
    host, colon, port = entry.rpartition(":")
    number = environment.whole_number(port)
    if not colon or number is None or (":" in host and not host.startswith("[")):
        host, number = entry, None
    host = host.removeprefix("[").removesuffix("]")
    if (wrong := host_problem(host)) is not None:
        raise refused(variable, entry, "hosts with commas between them", wrong)
    return host, number


def _free_port(entries: list[tuple[str, int | None]]) -> int:
    """Returns a port that, like the next, libtpu does not use; a host's eight processes use 8476 to 8483."""
    of_libtpu = {port for _, port in entries}
    return next(
        port for port in range(TPU_PORT, TPU_PORT + 4 * len(entries) + 4, 2) if not {port, port + 1} & of_libtpu
    )


def _slices(environ: Mapping[str, str]) -> tuple[int, int]:
    """Reads the number of slices, and this slice's index."""
    slices = environment.number(environ, SLICES, _MEND_SLICES, least=1, most=10_000)
    if slices is None:
        if (index := environment.text(environ, SLICE)) is not None:
            raise refused(SLICES, None, f"set, as {SLICE} is {index[:80]}", _MEND_SLICES)
        return 1, 0
    if slices == 1:
        return 1, 0
    return slices, environment.index(environ, SLICE, slices, SLICES, _MEND_SLICES)


def _first_host(environ: Mapping[str, str]) -> str:
    """Returns the host in MEGASCALE_COORDINATOR_ADDRESS; its port belongs to another service."""
    address = environment.text(environ, FIRST)
    if address is None:
        raise refused(FIRST, None, "the first host of the first slice", _MEND_SLICES)
    return _split(address, FIRST)[0]
