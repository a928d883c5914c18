"""JAX's distributed runtime: checks before it starts, its start, and its errors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from jdist.cluster.spec import ClusterSpec
from jdist.errors import ClusterError, DeviceError
from jdist.support.tracebacks import causes

# Only its text tells the ValueError of a collective that fails while it is dispatched from others.
_STATUS = re.compile(
    r"(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION|DATA_LOSS): "
)
# JAX measures its heartbeats by the wall clock, which somebody may set. The watch decides which process is lost.
NEVER_S = 60 * 365 * 24 * 3600  # int32 holds 68 years


def check_unused() -> None:
    """Refuses a process in which JAX runs already, before other processes wait for it."""
    if jax.distributed.is_initialized():
        raise ClusterError(
            "`jax.distributed.initialize` was called already. Leave it out: `jdist.multi_worker()` calls it."
        )
    if is_started():
        raise ClusterError(
            "JAX has started its devices already, without the other processes. Call `jdist.multi_worker()` before anything "
            "computes with JAX or asks for its devices."
        )


def is_started() -> bool:
    """Returns whether JAX has started its devices in this process."""
    minutes = "jax_cpu_get_global_topology_timeout_minutes"
    try:
        # The only public sign of started devices: JAX refuses to change how they are started.
        jax.config.update(minutes, 1 + jax.config.values[minutes])
    except RuntimeError:
        return True
    return False


def initialize(
    spec: ClusterSpec, bind_address: str | None, timeout_s: float, *, coordinator_address: str | None = None
) -> None:
    """Starts JAX's runtime in this process, and waits until all processes have started it."""
    # `bind_address` is the listening address of the coordinator on process 0; None elsewhere.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It catches SIGTERM for an agreement of its own; a program that does not ask for that never ends.
    jax.config.update("jax_enable_preemption_service", False)
    # Else a wall clock that is set back to before the last heartbeat ends all: JAX computes their age without a sign.
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(
        coordinator_address=coordinator_address or spec.coordinator_address,
        num_processes=spec.num_processes,
        process_id=spec.process_index,
        local_device_ids=None if spec.local_device_ids is None else list(spec.local_device_ids),
        # Else JAX reads Slurm's variables again, and takes only one of a task's GPUs.
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, round(timeout_s)),
        coordinator_bind_address=bind_address,
        heartbeat_timeout_seconds=NEVER_S,
        shutdown_timeout_seconds=NEVER_S,
    )


def check_devices(devices: Sequence[Any]) -> None:
    """Refuses, by a DeviceError, processes with different numbers of devices: each gets as many rows as any other."""
    counts = Counter(device.process_index for device in devices)
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"process {i} has {counts[i]}" for i in sorted(counts))
        raise DeviceError(
            f"the processes have different numbers of devices: {listed}. Each process reads as many rows as any other, so "
            "start each with as many devices: on GPUs CUDA_VISIBLE_DEVICES says which of them a process sees."
        )


def is_error_of_jax(error: BaseException) -> bool:
    """Returns whether an error, or one that led to it, came from JAX's runtime, as a broken collective's does."""
    return any(isinstance(each, jax.errors.JaxRuntimeError) or _STATUS.match(str(each)) for each in causes(error))
