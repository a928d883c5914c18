"""Clusters in JSON: TF_CONFIG, set by people, Kubeflow's TFJob and Vertex AI; Vertex AI's CLUSTER_SPEC."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping
from typing import Any

from jdist.cluster.address import refused
from jdist.cluster.environment import text, whole_number
from jdist.cluster.resolvers.jax_env import make_spec
from jdist.cluster.spec import JOBS, ClusterSpec
from jdist.errors import ClusterConfigError

VARIABLE = "TF_CONFIG"
_EXAMPLE = '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}'
_WRITE, _NUMBER = f"Write {_EXAMPLE}.", "Number the tasks from 0."
VERTEX = "CLUSTER_SPEC"
_VERTEX_JOBS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps", "workerpool3": "evaluator"}
_VERTEX_MEND = "Vertex AI sets it; unset it where it is another program's."
_refused = functools.partial(refused, VARIABLE)


def tf_config(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads TF_CONFIG.

    Args:
        environ: the environment, with TF_CONFIG in JSON. `cluster` maps each job to a list of addresses, or to an object
            from index to address; an address may be null: not known. `task` has this process's `type` and `index`, a number
            or its text. Other keys (`environment`, `rpc_layer`) are not read. Without a chief, worker 0 is the chief.

    Example:
        >>> config = '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": "1"}}'
        >>> tf_config({"TF_CONFIG": config})
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from tf_config)
    """
    source = text(environ, VARIABLE)
    if source is None:
        return None
    config = _parse(source)
    if not isinstance(config, dict):
        raise _refused(source, "a JSON object", _WRITE)
    if "sparseCluster" in config:
        disable, value = "Set `enableDynamicWorker: false` in the TFJob.", config["sparseCluster"]
        raise _refused(value, "absent: all workers must be known", disable, field="sparseCluster")
    cluster, task = config.get("cluster"), config.get("task")
    if cluster in (None, {}) and task in (None, {}):
        if (job := next((job for job in JOBS if job in config), None)) is not None:
            raise _refused(config[job], "inside of `cluster`, next to `task`", _WRITE, field=job)
        return None
    if cluster in (None, {}):
        name = "Name every process; to train in one process alone, unset TF_CONFIG."
        raise _refused(cluster, "there, as `task` is", name, field="cluster")
    if not isinstance(cluster, dict):
        raise _refused(cluster, "an object from job to addresses", _WRITE, field="cluster")
    if not isinstance(task, dict):
        raise _refused(task, "an object with `type` and `index`", _WRITE, field="task")
    task_type = task.get("type")
    if not isinstance(task_type, str):
        raise _refused(task_type, "chief, worker, ps or evaluator", _WRITE, field="task.type")
    if "master" in cluster and "chief" in cluster:
        one = "Leave one of them: `master` is TensorFlow 1's word for `chief`."
        raise _refused(cluster["master"], "absent, as `chief` is there", one, field="cluster.master")
    jobs = {_today(job): _tasks(job, tasks) for job, tasks in cluster.items()}
    place = _today(task_type), _index(task.get("index"), "task.index")
    return make_spec(environ, "tf_config", jobs, place, (VARIABLE, VARIABLE, VARIABLE))


def _today(job: str) -> str:
    """Translates TensorFlow 1's name of a job."""
    return "chief" if job == "master" else job


def _parse(source: str) -> Any:
    try:
        return json.loads(source, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise _refused(source, "JSON nested a few levels deep", _WRITE) from None
    except json.JSONDecodeError as exc:
        wrong = f"It is not JSON from character {exc.pos} on: {exc.msg}."
        raise refused(VARIABLE, source, "a JSON object", wrong) from None
    except ClusterConfigError:
        raise
    except ValueError:  # Python reads no number of thousands of digits
        raise _refused(source, "a JSON object", "It holds a number that is too long.") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a JSON object with each key once: Python itself would take the last of two values."""
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise _refused(value, "given once, but the key is there twice", "Leave one of them.", field=key)
        entries[key] = value
    return entries


def _constant(name: str) -> Any:
    raise _refused(name, "a JSON object", "JSON has no NaN or Infinity.")


def _tasks(job: str, tasks: Any) -> Any:
    """Makes a list of a job's addresses, of an object from index to address as well if it has no gap."""
    if not isinstance(tasks, dict):
        return tasks
    by_index: dict[int, Any] = {}
    for key, address in tasks.items():
        index = _index(key, f"cluster.{job}")
        if index in by_index:
            raise _refused(key, "an index of its own", _NUMBER, field=f"cluster.{job}")
        by_index[index] = address
    for i in range(len(by_index)):
        if i not in by_index:
            there = ", ".join(map(str, sorted(by_index)[:6]))
            raise _refused(None, f"there, as the tasks are {there}", _NUMBER, field=f"{job}[{i}]")
    return [by_index[i] for i in range(len(by_index))]


def _index(value: Any, field: str) -> int:
    index = whole_number(value.strip()) if isinstance(value, str) else value
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise _refused(value, "a whole number of at least 0", _NUMBER, field=field)
    return index


def vertex(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads CLUSTER_SPEC: its first worker pool is the chief, the others are workers, ps and evaluator.

    Args:
        environ: the environment. Where Vertex AI sets TF_CONFIG as well, that comes first and tells the same.

    Example:
        >>> vertex({"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a-0:2222"], "workerpool1": ["b-0:2222", "b-1:2222"]}, '
        ...                         '"task": {"type": "workerpool1", "index": 1}}'})
        ClusterSpec(worker 1, process 2 of 3; cluster: 1 chief, 2 worker; from vertex)

    Source: Vertex AI, "Distributed training", "CLUSTER_SPEC format".
    """
    source = text(environ, VERTEX)
    if source is None:
        return None
    config: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        config = json.loads(source)
    cluster: Any = config.get("cluster") if isinstance(config, dict) else None
    task: Any = config.get("task") if isinstance(config, dict) else None
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise refused(VERTEX, source, "a JSON object with the objects `cluster` and `task`", _VERTEX_MEND)
    pool, written_index = task.get("type"), task.get("index")
    jobs: dict[str, Any] = {_VERTEX_JOBS.get(name) or name: addresses for name, addresses in cluster.items()}
    number = whole_number(written_index) if isinstance(written_index, str) else None
    index: Any = written_index if number is None else number
    task_type = _VERTEX_JOBS.get(pool, pool) if isinstance(pool, str) else str(pool)
    return make_spec(environ, "vertex", jobs, (task_type, index), (VERTEX, VERTEX, VERTEX))
