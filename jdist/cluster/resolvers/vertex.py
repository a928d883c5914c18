"""The cluster of a Vertex AI training job: CLUSTER_SPEC."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from jdist.cluster.address import refused
from jdist.cluster.environment import text, whole_number
from jdist.cluster.resolvers.jax_env import chosen_devices
from jdist.cluster.spec import ClusterSpec

VARIABLE = "CLUSTER_SPEC"
_JOBS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps", "workerpool3": "evaluator"}
_MEND = "Vertex AI sets it; unset it where it is another program's."


def vertex(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Read CLUSTER_SPEC, in which the first worker pool is the chief, and the others are workers, ps and evaluator.

    Where Vertex AI sets TF_CONFIG as well, that comes first and says the same.

    Args:
        environ: the environment.

    Returns:
        The spec; None if CLUSTER_SPEC is not set.

    Raises:
        ClusterConfigError: CLUSTER_SPEC is no JSON object with `cluster` and `task`, or see `ClusterSpec`.

    Example:
        >>> vertex({"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a-0:2222"], "workerpool1": ["b-0:2222", "b-1:2222"]}, '
        ...                         '"task": {"type": "workerpool1", "index": 1}}'})
        ClusterSpec(worker 1, process 2 of 3; cluster: 1 chief, 2 worker; from vertex)

    Source: Vertex AI, "Distributed training", "CLUSTER_SPEC format".
    """
    source = text(environ, VARIABLE)
    if source is None:
        return None
    config: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        config = json.loads(source)
    cluster: Any = config.get("cluster") if isinstance(config, dict) else None
    task: Any = config.get("task") if isinstance(config, dict) else None
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise refused(VARIABLE, source, "a JSON object with the objects `cluster` and `task`", _MEND)
    found, written = task.get("type"), task.get("index")
    jobs: dict[str, Any] = {_JOBS.get(pool) or pool: addresses for pool, addresses in cluster.items()}
    number = whole_number(written) if isinstance(written, str) else None
    index: Any = written if number is None else number
    devices, devices_from = chosen_devices(environ)
    return ClusterSpec(
        jobs=jobs,
        task_type=_JOBS.get(found, found) if isinstance(found, str) else str(found),
        task_index=index,
        resolver="vertex",
        origins={"jobs": VARIABLE, "task_type": VARIABLE, "task_index": VARIABLE, **devices_from},
        local_device_ids=devices,
    )
