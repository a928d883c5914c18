"""The environment of a launched process: by TF_CONFIG it finds its cluster."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Mapping, Sequence

from jdist.cluster.environment import ATTEMPT
from jdist.errors import LaunchError
from jdist.launcher.exit_cause import Task
from jdist.launcher.options import check_at_least
from jdist.support.xla_flags import CPU_DEVICES, with_flags

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


# Below the range from which systems take ports for outgoing connections: between choosing a port here and its use
# by a process that has first to start, no connection can take it.
_RANGE = range(20_000, 32_000, 2)
_TRIES = 2_000


def free_ports(number: int) -> list[int]:
    """Distinct ports P such that P and P + 1 are free on all interfaces.

    Process 0 has JAX's coordinator at its port and jdist's watch channel at the next.

    Args:
        number: how many.

    Raises:
        OSError: so many were not found.
    """
    found: list[int] = []
    candidates = random.SystemRandom().sample(_RANGE, min(_TRIES, len(_RANGE)))
    for port in candidates:
        if len(found) == number:
            return found
        if _is_free(port) and _is_free(port + 1):
            found.append(port)
    if len(found) == number:
        return found
    raise OSError(f"only {len(found)} of {number} free pairs of ports found from {_RANGE.start} to {_RANGE.stop}")


def _is_free(port: int) -> bool:
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
