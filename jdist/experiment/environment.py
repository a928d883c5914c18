"""What a run's bits depend on besides its config: versions, devices, flags, source, data; and checksums of its state."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jdist
from jdist.checkpoint import leaves as codec
from jdist.data.adapters.recognize import adapted
from jdist.experiment.platform import variables
from jdist.experiment.prepare import Parts
from jdist.experiment.sources import digest, folder_sources, task_sources
from jdist.support.versions import installed

PyTree = Any
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def environment(parts: Parts, make: str) -> dict[str, Any]:
    """Lists everything that a run's bits depend on; equal if a run repeats to the bit."""
    devices = parts.strategy.devices or tuple(jax.devices())
    kinds = sorted({f"{device.platform} {device.device_kind}" for device in devices})
    sources = {"training data": parts.train_data, "evaluation data": parts.task.eval_data(parts.eval_batch)}
    return {
        "python": platform.python_version(),
        "jdist": jdist.__version__,
        "jdist source": digest(folder_sources(Path(jdist.__file__).parent)),
        **{package: installed(package) for package in _PACKAGES},
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "processor cores": os.cpu_count(),
        "devices": f"{len(devices)} x {', '.join(kinds)}",
        "processes": parts.strategy.cluster.num_processes,
        **variables(os.environ),
        "task source": digest(task_sources(make)),
        **{name: getattr(adapted(source), "fingerprint", "") or "unknown" for name, source in sources.items()},
    }


def _processor() -> str:
    """Names the processor's model: another one may have other vector instructions, and so round otherwise."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def checksums(state: PyTree) -> dict[str, str]:
    """Computes the sha256 of each host leaf's dtype, shape and bytes, by its path.

    Example:
        >>> list(checksums({"w": np.zeros(3)}))
        ["['w']"]
    """
    sums = {}
    for path, leaf in codec.flatten(state).items():
        array = np.ascontiguousarray(codec.without_keys(leaf))
        digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
        sums[path] = digest.hexdigest()
    return sums
