"""NVIDIA GPUs that need not be here, as XLA's GPU compiler takes them: the figures of a chip, and devices host by host."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import jaxlib.version
from jax.experimental import topologies

from jdist.core.replica_mesh import Device
from jdist.errors import DeviceError
from jdist.strategies import absent_plugins
from jdist.support.tracebacks import callers_level


class Core(NamedTuple):
    """A streaming multiprocessor."""

    capability: tuple[int, int]  # CUDA's compute capability of the architecture, (major, minor)
    fpus: int  # float32 units
    shared_memory_bytes: int
    most_shared_bytes: int  # of these, for one block of threads


class Gpu(NamedTuple):
    """The properties of a chip that XLA's compiler needs."""

    kind: str  # JAX's name of the device
    core: Core
    cores: int
    memory_bytes_per_s: int
    l2_bytes: int
    clock_ghz: float
    memory_bytes: int  # as the driver counts it
    gpus_per_host: int = 8  # the most that the maker's nodes join by NVLink


_VOLTA, _AMPERE = Core((7, 0), 64, 98_304, 98_304), Core((8, 0), 64, 167_936, 166_912)
_HOPPER, _BLACKWELL = Core((9, 0), 128, 233_472, 232_448), Core((10, 0), 128, 233_472, 232_448)
# From XLA's own descriptions, https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs, which has none
# of L4 and T4.
GPUS = {
    "v100": Gpu("Tesla V100-SXM2-16GB", _VOLTA, 80, 898_048_000_000, 6_291_456, 1.53, 16_935_682_048),
    "a100-40gb": Gpu("NVIDIA A100-SXM4-40GB", _AMPERE, 108, 1_555_200_000_000, 41_943_040, 1.41, 42_331_013_120, 16),
    "a100-80gb": Gpu("NVIDIA A100-SXM4-80GB", _AMPERE, 108, 2_039_040_000_000, 41_943_040, 1.41, 85_100_068_864),
    "h100": Gpu("NVIDIA H100 80GB HBM3", _HOPPER, 132, 3_352_320_000_000, 52_428_800, 1.98, 84_942_979_072),
    "h200": Gpu("NVIDIA H200 141GB HBM3e", _HOPPER, 132, 4_800_000_000_000, 52_428_800, 1.98, 151_397_597_184),
    "b200": Gpu("NVIDIA B200", _BLACKWELL, 148, 7_672_320_000_000, 132_644_864, 1.965, 191_514_411_008),
}
MOST_GPUS = 2**20  # which JAX takes 20 s to describe; beyond 2^31 XLA reads no number


def gpu_devices(chip: str, hosts: int, gpus_per_host: int) -> tuple[Device, ...]:
    """Describes absent GPUs, host by host: devices to compile for, which hold nothing."""
    gpu = GPUS[chip]
    name = f"{chip}:{gpus_per_host}" if hosts == 1 else f"{chip}:{hosts}x{gpus_per_host}"
    if hosts * gpus_per_host > MOST_GPUS:
        raise DeviceError(f"{name} is {hosts * gpus_per_host:,} GPUs; jdist describes at most {MOST_GPUS:,}.")
    if gpus_per_host > gpu.gpus_per_host:
        has = "is one host" if hosts == 1 else f"is {hosts} hosts"
        several = hosts * -(-gpus_per_host // gpu.gpus_per_host)
        each = -(-hosts * gpus_per_host // several)
        warnings.warn(
            f"{name} {has} with {gpus_per_host} GPUs{'' if hosts == 1 else ' each'}, but hosts with {chip} have at most "
            f"{gpu.gpus_per_host}; for several hosts write {chip}:{several}x{each}.",
            stacklevel=callers_level(),
        )
    options = {"target_config": _target_config(gpu), "topology": f"1x{hosts}x{gpus_per_host}"}
    _check_plugin(chip)
    try:
        try:
            description = topologies.get_topology_desc("", "cuda", **options)
        except NotImplementedError:  # the plugin was passed over when JAX started
            absent_plugins.load_plugin()
            description = topologies.get_topology_desc("", "cuda", **options)
    except (ImportError, NotImplementedError, RuntimeError) as exc:
        reason = str(exc).partition("\n")[0]
        raise DeviceError(
            f"JAX's CUDA plugin, which holds the GPU compiler, cannot be loaded: {reason}. Install it again: pip install "
            "--force-reinstall 'jdist[plan-gpu]'."
        ) from exc
    return tuple(sorted(description.devices, key=lambda device: (device.process_index, device.id)))


def _check_plugin(chip: str) -> None:
    plugin = absent_plugins.installed_plugin()
    if plugin is None:
        raise DeviceError(
            f"compiling for {chip} GPUs, which are not here, needs JAX's CUDA plugin: pip install 'jdist[plan-gpu]'."
        )
    version = absent_plugins.plugin_version(plugin)
    if version not in (None, jaxlib.version.__version__):
        raise DeviceError(
            f"JAX's CUDA plugin is {version} and jaxlib {jaxlib.version.__version__}; they must be of one version: pip install "
            "--upgrade 'jdist[plan-gpu]', which installs the plugin for the JAX that is there."
        )


def _target_config(gpu: Gpu) -> str:
    """Writes a chip as XLA's GpuTargetConfigProto, in protobuf's text format."""
    major, minor = gpu.core.capability
    # From Hopper on, the instructions of the exact chip, such as its tensor cores' ("sm_90a").
    features = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
          threads_per_block_limit: 1024
          threads_per_warp: 32
          shared_memory_per_block: 49152
          shared_memory_per_core: {gpu.core.shared_memory_bytes}
          shared_memory_per_block_optin: {gpu.core.most_shared_bytes}
          threads_per_core_limit: 2048
          core_count: {gpu.cores}
          fpus_per_core: {gpu.core.fpus}
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          memory_bandwidth: {gpu.memory_bytes_per_s}
          l2_cache_size: {gpu.l2_bytes}
          clock_rate_ghz: {gpu.clock_ghz}
          device_memory_size: {gpu.memory_bytes}
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 }}
        runtime_version {{ major: 12 minor: 8 patch: 0 }}
        device_description_str: "{gpu.kind}"
    """
