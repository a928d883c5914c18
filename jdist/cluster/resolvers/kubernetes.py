"""Pods: Kubernetes Jobs and JobSets, LeaderWorkerSets, Kubeflow's Trainer and JAXJob.

A TFJob sets TF_CONFIG, a PyTorchJob the variables of `torchrun`.
"""

from __future__ import annotations

from collections.abc import Mapping

from jdist.cluster import environment
from jdist.cluster.address import host_problem, join, refused
from jdist.cluster.resolvers.jax_env import ADDRESS, COUNT, INDEX, chosen_port, counted
from jdist.cluster.spec import ClusterSpec

POD = "KUBERNETES_SERVICE_HOST"  # set in every pod
COMPLETION_INDEX = "JOB_COMPLETION_INDEX"  # set in every pod of an Indexed Job
LEADER, GROUP_SIZE, WORKER = "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"
LEADER_PORT = 2223  # a pod's ports are its own
_HOST, _PORT, _COUNT, _INDEX = "COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID"


def kubernetes(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads the variables of a pod.

    - Kubeflow Trainer, with a runtime whose policy is `jax`, sets JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
      JAX_PROCESS_ID.
    - In a JobSet, or an Indexed Job with a headless service, the manifest sets JAX_COORDINATOR_ADDRESS and
      JAX_NUM_PROCESSES (configs/cluster/jobset.yaml), and Kubernetes JOB_COMPLETION_INDEX; in a LeaderWorkerSet
      LWS_WORKER_INDEX. JAX_PROCESS_ID, if set, replaces these two.
    - A JAXJob of Kubeflow's training operator has COORDINATOR_ADDRESS, COORDINATOR_PORT, NUM_PROCESSES and PROCESS_ID.

    It does not ask Kubernetes' API, so no service account needs rights.

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
    coordinator = _address(environ, _HOST, environment.port(environ, _PORT) or 0)
    return counted(environ, "kubernetes", coordinator, (_HOST, _COUNT, _INDEX))


def leader_worker_set(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads the group of a LeaderWorkerSet's pod, which is a job: one process in each pod, the leader first.

    It does not apply to a pod that is alone in its group.

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
    if coordinator is None and environment.text(environ, LEADER) is not None:
        coordinator = _address(environ, LEADER, chosen_port(environ, LEADER_PORT, "")[0])
    return counted(environ, "leader_worker_set", coordinator, (LEADER, GROUP_SIZE, WORKER))


def _address(environ: Mapping[str, str], variable: str, port: int) -> str:
    """Makes the address of process 0, of the host in a variable."""
    host = environ[variable].strip()
    if (wrong := host_problem(host)) is not None:
        raise refused(variable, host, "the name or address of process 0's host", wrong)
    return join(host, port)
