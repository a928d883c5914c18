"""libtpu, the library that drives a TPU and holds its compiler, on a machine without a TPU. Imports no JAX."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

# Without these libtpu asks a metadata server that is not there, and warns on standard error.
_NO_WORKER = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_NO_LOCK = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # it locks the machine, and a compiler needs no such lock


def is_installed() -> bool:
    """Whether libtpu can be found."""
    return importlib.util.find_spec("libtpu") is not None


def compiler_environment(environ: Mapping[str, str], *, dev: Path = Path("/dev")) -> dict[str, str]:
    """Lists the variables for a process that uses libtpu as a compiler; those already set stay."""
    wanted = _NO_LOCK if has_tpu(dev) else _NO_LOCK | _NO_WORKER
    return {name: value for name, value in wanted.items() if name not in environ}


def quiet_environment(environ: Mapping[str, str], *, dev: Path = Path("/dev")) -> dict[str, str]:
    """Lists the variables that keep an installed libtpu quiet when JAX looks for an absent TPU."""
    if not is_installed() or has_tpu(dev):
        return {}
    return {name: value for name, value in _NO_WORKER.items() if name not in environ}


def has_tpu(dev: Path = Path("/dev")) -> bool:
    """Whether this machine has a TPU, by its device files."""
    return any(dev.glob("accel*")) or any(dev.glob("vfio/[0-9]*"))  # /dev/vfio/vfio alone is the driver's
