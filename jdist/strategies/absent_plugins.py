"""The plugins for absent devices: libtpu, which drives a TPU and holds its compiler, and JAX's CUDA plugin with XLA's.

Imports no JAX by itself. JAX loads an installed CUDA plugin whenever it is imported and starts, and without a driver complains
about it on standard error and goes on without. So jdist has JAX pass over the plugin there, until something is compiled
for GPUs.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

# Without these libtpu asks a metadata server that is not there, and warns on standard error.
_NO_WORKER = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_NO_LOCK = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # it locks the machine, and a compiler needs no such lock
# The modules that JAX starts, and those that it takes its GPU kernels from when it is imported.
PLUGINS = {"jax_plugins.xla_cuda13": "jax_cuda13_plugin", "jax_plugins.xla_cuda12": "jax_cuda12_plugin"}
_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"  # of the CUDA libraries' versions, which a compiler can do without
_NOISE = (b"cudart_stub.cc", b"before absl::InitializeLog")


def has_libtpu() -> bool:
    """Returns whether libtpu can be found."""
    return importlib.util.find_spec("libtpu") is not None


def compiler_environment(environ: Mapping[str, str], *, dev: Path = Path("/dev")) -> dict[str, str]:
    """Lists the variables for a process that uses libtpu as a compiler; those already set stay."""
    wanted = _NO_LOCK if has_tpu(dev) else _NO_LOCK | _NO_WORKER
    return {name: value for name, value in wanted.items() if name not in environ}


def quiet_environment(environ: Mapping[str, str], *, dev: Path = Path("/dev")) -> dict[str, str]:
    """Lists the variables that keep an installed libtpu quiet when JAX looks for an absent TPU."""
    if not has_libtpu() or has_tpu(dev):
        return {}
    return {name: value for name, value in _NO_WORKER.items() if name not in environ}


def has_tpu(dev: Path = Path("/dev")) -> bool:
    """Returns whether this machine has a TPU, by its device files."""
    return any(dev.glob("accel*")) or any(dev.glob("vfio/[0-9]*"))  # /dev/vfio/vfio alone is the driver's


def installed_plugin() -> str | None:
    """Finds the module of the installed CUDA plugin, or returns None."""
    if importlib.util.find_spec("jax_plugins") is None:
        return None
    return next((name for name in PLUGINS if name in sys.modules or importlib.util.find_spec(name)), None)


def plugin_version(name: str) -> str | None:
    """Returns the version of an installed plugin's package; None if it does not say."""
    try:
        return importlib.metadata.version(PLUGINS[name])
    except importlib.metadata.PackageNotFoundError:
        return None


def has_driver(dev: Path = Path("/dev")) -> bool:
    """Returns whether this machine has NVIDIA's driver, by its device files (`dxg` is that of Linux within Windows)."""
    return any((dev / name).exists() for name in ("nvidiactl", "nvidia0", "nvhost-gpu", "dxg"))


class _PassedOver(types.ModuleType):
    """Stands for the plugin where JAX is to go on without it."""

    def initialize(self) -> None:
        """Registers nothing."""


def pass_over_plugin(*, dev: Path = Path("/dev")) -> None:
    """Makes JAX start without the CUDA plugin if the driver is missing; a loaded plugin stays."""
    # Before JAX is imported, its GPU kernels are skipped too, so that it starts as without the
    # plugin.
    name = installed_plugin()
    if name is None or has_driver(dev):
        return
    if name not in sys.modules:
        sys.modules[name] = _PassedOver(name)
    if "jax" not in sys.modules:
        sys.modules[PLUGINS[name]] = None  # type: ignore[assignment] # None is Python's own mark of what must not be imported


def import_jax() -> None:
    """Imports JAX with its GPU kernels, without their messages about a missing driver; the plugin is passed over there."""
    with _quiet_stderr():
        importlib.import_module("jax")
    pass_over_plugin()


def load_plugin() -> None:
    """Registers the CUDA plugin with JAX, with or without a driver."""
    name = installed_plugin()
    if name is None:
        raise ImportError("no CUDA plugin is installed")
    if isinstance(sys.modules.get(name), _PassedOver):
        del sys.modules[name]
    if sys.modules.get(PLUGINS[name], name) is None:
        del sys.modules[PLUGINS[name]]
    with _quiet_stderr(), variables({_SKIP_CHECK: "1"}):
        importlib.import_module(name).initialize()


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Sets those variables that are not set, and takes them back: what starts later may be meant for a device here."""
    new = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Keeps the plugin's notes about a missing driver from standard error; passes on everything else."""
    if sys.stderr is None:  # as after `2>&-`; descriptor 2 may then be any file
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            for line in caught:
                if not any(note in line for note in _NOISE):
                    os.write(2, line)
