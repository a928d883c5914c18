"""JAX's CUDA plugin, which holds XLA's GPU compiler, on a machine with or without a GPU. Imports no JAX by itself.

JAX loads an installed plugin whenever it is imported and starts, and where there is no driver complains about it on standard
error and goes on without. So jdist has JAX pass over the plugin there, until something is to be compiled for GPUs.
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
from collections.abc import Iterator
from pathlib import Path

# The modules that JAX starts, and those that it takes its GPU kernels from when it is imported.
PLUGINS = {"jax_plugins.xla_cuda13": "jax_cuda13_plugin", "jax_plugins.xla_cuda12": "jax_cuda12_plugin"}
_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"  # of the CUDA libraries' versions, which a compiler can do without
_NOISE = (b"cudart_stub.cc", b"before absl::InitializeLog")


def installed_plugin() -> str | None:
    """Finds the module of the installed CUDA plugin; None if there is none."""
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
    """Whether this machine has NVIDIA's driver, by its device files (`dxg` is that of Linux within Windows)."""
    return any((dev / name).exists() for name in ("nvidiactl", "nvidia0", "nvhost-gpu", "dxg"))


class _PassedOver(types.ModuleType):
    """Stands for the plugin where JAX is to go on without it."""

    def initialize(self) -> None:
        """Registers nothing."""


def pass_over_plugin(*, dev: Path = Path("/dev")) -> None:
    """Makes JAX start without the CUDA plugin if there is no driver; a loaded plugin stays."""
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
    """Imports JAX with its GPU kernels, without what these print where there is no driver; the plugin is passed over there."""
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
    with _quiet_stderr(), _variable(_SKIP_CHECK, "1"):
        importlib.import_module(name).initialize()


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Sets a variable that is not set, and takes it back."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Keeps the plugin's notes that there is no driver from standard error; passes on everything else."""
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
