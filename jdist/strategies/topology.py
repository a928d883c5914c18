"""Names of topologies, and their devices, which need not be here; TPU devices in the order of their interconnect.

libtpu holds the TPU compiler, and it can describe any TPU: on the devices that it gives a program can be
compiled as for the real ones. `gpu_topology` describes GPUs.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax.experimental import mesh_utils, topologies

from jdist.core.replica_mesh import Device
from jdist.errors import DeviceError
from jdist.strategies import absent_plugins
from jdist.strategies.gpu_topology import GPUS, gpu_devices

# What libtpu calls each chip, and the options that give the devices JAX has on a machine with that chip.
# A v4 chip has two cores that JAX drives as one device ("megacore"); later chips need no option for it.
CHIPS: dict[str, dict[str, Any]] = {
    "v2": {},
    "v3": {},
    "v4": {"chip_config_name": "megacore"},
    "v5e": {},
    "v5p": {},
    "v6e": {},
    "tpu7x": {},
}
EXAMPLES = ("v4:2x2x1", "v5e:2x4", "v5p:8x8x8", "v6e:16x16")
FORMS = '"v5e:2x4", "v6e:16x16", "v5p:8x8x8", "v5p:8x8x8,slices=2" for several slices, or by size: "v5e-16"'
GPU_FORMS = '"h100:8" for eight GPUs of one host, "h100:4x8" for four such hosts'


_FORM = r"(\w+):([1-9]\d*(?:x[1-9]\d*){1,2})(?:,slices=([1-9]\d*))?"
_GPU_FORM = rf"({'|'.join(GPUS)}):([1-9]\d*)(?:x([1-9]\d*))?"

# Cloud TPU's accelerator types, such as v5litepod-16. The number counts TensorCores (these chips have two), and
# chips for v5e and v6e. Powers of two as https://cloud.google.com/tpu/docs/v4 (v5p, v5e, v6e, ...) lists their shapes.
_BY_SIZE = r"(v2|v3|v4|v5e|v5litepod|v5p|v6e)-([1-9]\d*)"
_CORES_OF_CHIP = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2}
_MOST_CHIPS = {"v2": 256, "v3": 1024, "v4": 2048, "v5e": 256, "v5p": 4096, "v6e": 256}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The parts of a name such as "v5p:8x8x8,slices=2" or "h100:4x8"."""

    chip: str
    # chips of a TPU slice along each dimension of its torus; (hosts, GPUs of each)
    shape: tuple[int, ...]
    slices: int = 1  # TPU slices that the data-centre network joins

    @property
    def platform(self) -> str:
        """JAX's name of the platform, "tpu" or "gpu"."""
        return "gpu" if self.chip in GPUS else "tpu"

    @property
    def domain_chips(self) -> int | None:
        """Number of chips that the fast links join, where the name says so: of a host of GPUs, of one slice of several."""
        if self.platform == "gpu":
            return self.shape[1]
        return prod(self.shape) if self.slices > 1 else None

    def __str__(self) -> str:
        text = f"{self.chip}:{'x'.join(map(str, self.shape))}"
        return text if self.slices == 1 else f"{text},slices={self.slices}"


def parse_topology(name: str) -> Topology:
    """Reads CHIP:SHAPE, CHIP:SHAPE,slices=N or CHIP-SIZE of a TPU, CHIP:GPUS or CHIP:HOSTSxGPUS."""
    if gpus := re.fullmatch(_GPU_FORM, str(name)):
        hosts, each = (1, gpus[2]) if gpus[3] is None else (gpus[2], gpus[3])
        return Topology(chip=gpus[1], shape=(int(hosts), int(each)))
    if by_size := re.fullmatch(_BY_SIZE, str(name)):
        chip = "v5e" if by_size[1] == "v5litepod" else by_size[1]
        return Topology(chip=chip, shape=_shape_of_size(str(name), chip, int(by_size[2])))
    match = re.fullmatch(_FORM, str(name))
    if match is None:
        raise DeviceError(
            f"{name!r} names no topology; write CHIP:SHAPE, such as {FORMS}; or of GPUs {GPU_FORMS}.{nearest(str(name))} "
            f"{_CHIPS}{_undescribed(str(name))}"
        )
    chip, shape, slices = match.groups()
    if chip in GPUS:
        raise DeviceError(f"{name!r}: GPUs are counted by host, as {GPU_FORMS}.{nearest(name)}")
    if chip not in CHIPS:
        raise DeviceError(f"{name!r}: unknown TPU {chip!r}.{nearest(name)} {_CHIPS}{_undescribed(name)}")
    return Topology(chip=chip, shape=tuple(map(int, shape.split("x"))), slices=int(slices or 1))


def is_by_size(name: str) -> bool:
    """Returns whether a topology is named by its size, as "v5e-16" is."""
    return re.fullmatch(_BY_SIZE, name) is not None


def _shape_of_size(name: str, chip: str, size: int) -> tuple[int, ...]:
    """Finds the shape of a Cloud TPU slice of so many cores or chips: as near to a square or a cube as powers of two are."""
    cores = _CORES_OF_CHIP.get(chip, 1)
    chips, rest = divmod(size, cores)
    is_torus = chip in ("v4", "v5p")
    least = 1 if cores == 1 else 4
    if rest or chips & (chips - 1) or not least <= chips <= _MOST_CHIPS[chip] or (chips == 2 and cores == 1):
        sizes = [n * cores for n in (2**e for e in range(13)) if least <= n <= _MOST_CHIPS[chip] and n != 2]
        counted = "chips" if cores == 1 else "TensorCores, two a chip"
        raise DeviceError(
            f"{name!r}: no slice of {chip} has that size, which counts {counted}. Sizes: {', '.join(map(str, sizes))}; "
            f"or write the shape, such as {'v4:2x2x3' if is_torus else 'v5e:2x4'}."
        )
    exponent = chips.bit_length() - 1
    dims = 3 if is_torus else 2
    parts = [(exponent + i) // dims for i in range(dims)]  # ascending, their sum is the exponent
    shape = tuple(2**part for part in parts)
    return shape[::-1] if is_torus and chips == 4 else shape  # 2x2x1: a host's four chips lie in a plane


_CHIPS = f"Chips: {', '.join(CHIPS)}. GPUs: {', '.join(GPUS)}."


def _undescribed(name: str) -> str:
    """Says why a GPU that there is cannot be named; empty for every other name."""
    chip = name.lower().partition(":")[0]
    known = ("a10", "a10g", "gh200", "l4", "l40", "l40s", "p100", "p4", "t4")
    return f" XLA publishes no description of {chip} that its compiler takes." if chip in known else ""


def nearest(name: str) -> str:
    """Suggests a known topology for `name`, as a sentence for an error; empty if none is close."""
    chip, _, rest = name.lower().partition(":")
    chips = [*CHIPS, *GPUS]
    known = [each for each in chips if chip and (each.startswith(f"{chip}-") or chip.startswith(f"{each}-"))]
    known = known or difflib.get_close_matches(chip, chips, n=1)
    if not known:
        return ""
    meant = f"{known[0]}:{rest}"
    if not re.fullmatch(_GPU_FORM if known[0] in GPUS else _FORM, meant) or meant == name:
        # Only the chip was right, or close: a shape that it has.
        default = f"{known[0]}:8" if known[0] in GPUS else f"{known[0]}:2x2"
        meant = next((example for example in EXAMPLES if example.startswith(known[0])), default)
    return f" Did you mean {meant!r}?"


def topology_devices(name: str) -> tuple[Device, ...]:
    """Makes a topology's devices, perhaps absent, in interconnect order; GPUs host by host."""
    # They serve to build a mesh and to compile; nothing can be put on them.
    topology = parse_topology(name)
    if topology.platform == "gpu":
        return gpu_devices(topology.chip, *topology.shape)
    if not absent_plugins.has_libtpu():
        raise DeviceError(
            f"compiling for {name!r}, which is not here, needs the TPU compiler: pip install 'jdist[plan-tpu]'."
        )
    options = dict(CHIPS[topology.chip])
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if len([n for n in topology.shape if n > 1]) < 2:  # less than the 2 x 2 chips that libtpu takes a host to have
        options["chips_per_host_bounds"] = (*topology.shape, 1)[:3]
    try:
        with absent_plugins.variables(absent_plugins.compiler_environment(os.environ)):
            description = topologies.get_topology_desc(
                f"{topology.chip}:{'x'.join(map(str, topology.shape))}", "tpu", **options
            )
    except (RuntimeError, NotImplementedError) as exc:
        reason = str(exc).partition("\n")[0]
        if not reason.startswith("INVALID_ARGUMENT: "):  # it did not get as far as the topology
            raise DeviceError(
                f"libtpu, which holds the TPU compiler, cannot be loaded: {reason}. Install it again, pip install "
                "--force-reinstall 'jdist[plan-tpu]', and unset TPU_LIBRARY_PATH if it is set."
            ) from exc
        reason = reason.removeprefix("INVALID_ARGUMENT: ")
        raise DeviceError(f"libtpu cannot describe {name!r}: {reason}. Forms: {FORMS}.") from exc
    return in_interconnect_order(description.devices)


def in_interconnect_order(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Orders TPU devices so that neighbours are neighbours in the torus; slices stay together."""
    # `devices` are all of one slice, or of several slices of one shape.
    slices = sorted({getattr(d, "slice_index", None) or 0 for d in devices})
    if len(slices) == 1:
        return tuple(mesh_utils.create_device_mesh((len(devices),), devices=devices).flat)
    per_slice = len(devices) // len(slices)
    return tuple(mesh_utils.create_hybrid_device_mesh((per_slice,), (len(slices),), devices=devices).flat)


def attached_tpu_devices(num_processes: int = 1) -> tuple[Device, ...]:
    """Finds this machine's TPU devices in interconnect order, host by host; starts the TPU."""
    # Each of `num_processes` processes drives one host.
    try:
        devices = jax.devices("tpu")
    except RuntimeError as exc:
        seen = ", ".join(f"{d.platform}:{d.id}" for d in jax.local_devices()[:4])
        raise DeviceError(
            f"JAX found no TPU; it sees {seen}{', ...' if jax.local_device_count() > 4 else ''}"
            f" (JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r}). In Colab: Runtime, Change runtime type, TPU. On a "
            "Cloud TPU VM: pip install 'jdist[tpu]', and leave JAX_PLATFORMS unset. To compile for a TPU that is not "
            'here: jdist.tpu(topology="v5e:2x4").'
        ) from exc
    return by_host(in_interconnect_order(devices), num_processes)


def by_host(devices: Sequence[Device], num_processes: int) -> tuple[Device, ...]:
    """Sorts devices by host, so that a process feeds successive rows; otherwise stable."""
    hosts = list(dict.fromkeys(d.process_index for d in devices))
    if len(hosts) != num_processes:
        processes = "1 process" if num_processes == 1 else f"{num_processes} processes"
        raise DeviceError(
            f"this TPU spans {len(hosts)} hosts, {len(devices)} devices, but the cluster in the environment has {processes}. "
            "Start the program on every host with the variables in docs/cluster_environments.md, or take a slice of one host, "
            "such as v5e-8."
        )
    return tuple(sorted(devices, key=lambda d: hosts.index(d.process_index)))
