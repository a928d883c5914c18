"""The environment of a launched process, with its cluster in TF_CONFIG, and free ports for the addresses there."""

from __future__ import annotations

import itertools
import json
import random
import socket
from collections.abc import Mapping, Sequence

from jdist.cluster.environment import ATTEMPT, NUMBER, WORLDS
from jdist.launcher.exit_cause import Task
from jdist.support.xla import CPU_DEVICES, with_flags

# Variables of the cluster that this launcher itself is part of.
OF_CLUSTER = (
    *("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    *(WORLDS, NUMBER),
)
# Below the range from which systems take ports for outgoing connections: none takes a port while
# its process starts.
_RANGE = range(20_000, 32_000, 2)
_TRIES = 2_000


def child_environment(
    environ: Mapping[str, str],
    task: Task,
    cluster: Mapping[str, Sequence[str]],
    *,
    attempt: int,
    devices_per_process: int | None = None,
) -> dict[str, str]:
    """Makes one process's full environment; `devices_per_process` counts virtual CPU devices."""
    # `cluster` has each job's addresses, host:port, without the evaluator. Attempts count from 0.
    variables = {name: value for name, value in environ.items() if name not in OF_CLUSTER}
    variables["TF_CONFIG"] = json.dumps(
        {"cluster": {job: list(a) for job, a in cluster.items()}, "task": {"type": task.type, "index": task.index}}
    )
    variables[ATTEMPT] = str(attempt)
    variables.setdefault("PYTHONUNBUFFERED", "1")  # else a process that is killed takes its last lines with it
    if devices_per_process is not None:
        variables["JAX_PLATFORMS"] = "cpu"
        variables["XLA_FLAGS"] = with_flags(environ.get("XLA_FLAGS", ""), {CPU_DEVICES: str(devices_per_process)})
    return variables


def free_ports(number: int) -> list[int]:
    """Finds ports that are free on all interfaces, as is each next one, for the watch."""
    candidates = random.SystemRandom().sample(_RANGE, min(_TRIES, len(_RANGE)))
    free = (port for port in candidates if _is_free(port) and _is_free(port + 1))
    ports = list(itertools.islice(free, number))
    if len(ports) < number:
        raise OSError(f"only {len(ports)} of {number} free pairs of ports found from {_RANGE.start} to {_RANGE.stop}")
    return ports


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
