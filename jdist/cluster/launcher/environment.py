"""The environment of a launched process: by TF_CONFIG it finds its cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from jdist.cluster.launcher.options import check_at_least
from jdist.cluster.launcher.verdict import Task
from jdist.errors import LaunchError
from jdist.xla_flags import CPU_DEVICES, with_flags

ATTEMPT = "JDIST_LAUNCH_ATTEMPT"
# What another launcher said of the cluster that this launcher itself is part of.
_REMOVED = ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def child_environment(
    environ: Mapping[str, str],
    task: Task,
    cluster: Mapping[str, Sequence[str]],
    *,
    attempt: int,
    devices_per_process: int | None = None,
) -> dict[str, str]:
    """The whole environment of one process.

    Args:
        environ: the launcher's own.
        task: which process; the evaluator is not among those of the cluster.
        cluster: for each job the addresses, host:port.
        attempt: counted from 0; in JDIST_LAUNCH_ATTEMPT.
        devices_per_process: virtual CPU devices to make; None leaves the devices as they are.
    """
    variables = {name: value for name, value in environ.items() if name not in _REMOVED}
    variables["TF_CONFIG"] = json.dumps(
        {"cluster": {job: list(a) for job, a in cluster.items()}, "task": {"type": task.type, "index": task.index}}
    )
    variables[ATTEMPT] = str(attempt)
    variables.setdefault("PYTHONUNBUFFERED", "1")  # else a process that is killed takes its last lines with it
    if devices_per_process is not None:
        variables["JAX_PLATFORMS"] = "cpu"
        variables["XLA_FLAGS"] = with_flags(environ.get("XLA_FLAGS", ""), {CPU_DEVICES: str(devices_per_process)})
    return variables


def check_cpu_devices(devices_per_process: int | None, environ: Mapping[str, str]) -> None:
    """Refuses virtual CPU devices where there can be none.

    Args:
        devices_per_process: how many are wanted; None for the devices that JAX finds.
        environ: the launcher's environment.

    Raises:
        LaunchError: less than one, or JAX_PLATFORMS rules CPU devices out.
    """
    if devices_per_process is None:
        return
    check_at_least("devices_per_process", devices_per_process, 1)
    chosen = environ.get("JAX_PLATFORMS", "")
    if chosen and "cpu" not in chosen.split(","):
        raise LaunchError(
            f"devices_per_process={devices_per_process} asks for virtual CPU devices, but JAX_PLATFORMS={chosen} "
            f"rules them out. Unset it, or leave devices_per_process out."
        )
