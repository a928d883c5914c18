"""The cluster of a pod: Kubernetes Jobs and JobSets, Kubeflow's Trainer and JAXJob. (A TFJob sets TF_CONFIG.)"""

from __future__ import annotations

from collections.abc import Mapping

from jdist.cluster import environment
from jdist.cluster.address import ALLOWED, join, problem
from jdist.cluster.refuse import refused
from jdist.cluster.resolvers.jax_env import counted
from jdist.cluster.resolvers.jax_variables import ADDRESS, COUNT, INDEX
from jdist.cluster.spec import ClusterSpec

POD = "KUBERNETES_SERVICE_HOST"  # set in every pod
COMPLETION_INDEX = "JOB_COMPLETION_INDEX"  # set in every pod of an Indexed Job
_HOST, _PORT, _COUNT, _INDEX = "COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID"


def kubernetes(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Read what a pod is told of its cluster.

    - Kubeflow Trainer, with a runtime whose policy is `jax`: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
      JAX_PROCESS_ID are set.
    - JobSet, or an Indexed Job with a headless service: the manifest sets JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES,
      and Kubernetes sets JOB_COMPLETION_INDEX (configs/cluster/jobset.yaml). JAX_PROCESS_ID, if set, counts instead.
    - Kubeflow's training operator, JAXJob: COORDINATOR_ADDRESS, COORDINATOR_PORT, NUM_PROCESSES and PROCESS_ID are set.

    Kubernetes' API is not asked, so no service account needs rights.

    Args:
        environ: the environment.

    Returns:
        The spec, with workers alone; None outside a pod, or in one that is told nothing.

    Raises:
        ClusterConfigError: some of the variables are missing, or hold something else.

    Example:
        >>> kubernetes({
        ...     "KUBERNETES_SERVICE_HOST": "10.0.0.1", "JAX_COORDINATOR_ADDRESS": "train-workers-0-0.train:1234",
        ...     "JAX_NUM_PROCESSES": "2", "JOB_COMPLETION_INDEX": "1",
        ... })
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from kubernetes)

    Source: kubeflow/trainer, pkg/runtime/framework/plugins/jax; kubeflow/training-operator, pkg/controller.v1/jax;
    Kubernetes, "Indexed Job for parallel processing with static work assignment".
    """

    def there(name: str) -> bool:
        return environment.text(environ, name) is not None

    if not there(POD):
        return None
    if there(COUNT) or there(INDEX):
        return counted(
            environ,
            resolver="kubernetes",
            coordinator=environment.address(environ, ADDRESS),
            address_variable=ADDRESS,
            count_variable=COUNT,
            index_variable=INDEX if there(INDEX) else COMPLETION_INDEX,
        )
    if all(map(there, (_HOST, _PORT, _COUNT, _INDEX))):
        return counted(
            environ,
            resolver="kubernetes",
            coordinator=_joined(environ),
            address_variable=_HOST,
            count_variable=_COUNT,
            index_variable=_INDEX,
        )
    return None


def _joined(environ: Mapping[str, str]) -> str:
    """The address whose host and port are in two variables."""
    host = environ[_HOST].strip()
    address = join(host, environment.port(environ, _PORT) or 0)
    if (wrong := problem(address)) is not None:
        raise refused(_HOST, host, f"the host of an address {ALLOWED}", wrong)
    return address
