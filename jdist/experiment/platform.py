"""Environment variables that XLA reads once, when JAX starts its devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from jdist.errors import ConfigError
from jdist.experiment.config import PlatformSection
from jdist.strategies.absent_plugins import quiet_environment
from jdist.support.xla import CPU_DEVICES, with_flags

# The first rules out kernels with sums that depend on the order of threads, the second the choice of kernels
# by stopwatch, in each process again.
DETERMINISTIC = {"--xla_gpu_deterministic_ops": "true", "--xla_gpu_autotune_level": "0"}
# Variables that change what XLA computes; a replay sets them again.
VARIABLES = (
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_DEFAULT_PRNG_IMPL",
    "JAX_ENABLE_X64",
    "JAX_PLATFORMS",
    "JAX_THREEFRY_PARTITIONABLE",
    "LIBTPU_INIT_ARGS",
    "NVIDIA_TF32_OVERRIDE",
    "XLA_FLAGS",
)


def platform_environment(section: PlatformSection, environ: Mapping[str, str]) -> dict[str, str]:
    """Makes the variables for a config's `platform`; keeps other XLA flags."""
    flags, variables = {}, {}
    if section.cpu_devices is not None:
        chosen = environ.get("JAX_PLATFORMS", "")
        if chosen and "cpu" not in chosen.split(","):
            raise ConfigError(
                f"platform.cpu_devices={section.cpu_devices} asks for CPU devices, but "
                f"JAX_PLATFORMS={chosen} rules them out. Unset it, or set platform.cpu_devices=null."
            )
        flags[CPU_DEVICES] = str(section.cpu_devices)
        variables["JAX_PLATFORMS"] = "cpu"
    if section.deterministic:
        flags |= DETERMINISTIC
    if flags:
        variables["XLA_FLAGS"] = with_flags(environ.get("XLA_FLAGS", ""), flags)
    return variables


def apply_platform(section: PlatformSection) -> None:
    """Sets the variables for `platform`; must be called before JAX is used."""
    started = "jax" in sys.modules
    os.environ.update(platform_environment(section, os.environ))
    os.environ.update(quiet_environment(os.environ))
    if section.cpu_devices is None or not started:
        return
    import jax

    jax.config.update("jax_platforms", "cpu")  # JAX read JAX_PLATFORMS when it was imported
    if jax.local_device_count() != section.cpu_devices:
        raise ConfigError(
            f"platform.cpu_devices={section.cpu_devices}, but JAX had started in this process with "
            f"{jax.local_device_count()} {jax.default_backend()} devices. Start a new process."
        )


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Picks those of `VARIABLES` that are set; flags are sorted, as their order means nothing."""
    return {name: " ".join(sorted(environ[name].split())) for name in VARIABLES if environ.get(name)}
