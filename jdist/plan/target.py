"""The devices to compile for, named by `--topology`, and a config's strategy on them; JAX is imported where it is needed."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from jdist.errors import DeviceError, StrategyError
from jdist.experiment.config import MOST_CPU_DEVICES, PlatformSection
from jdist.experiment.platform import apply_platform
from jdist.support.words import did_you_mean

if TYPE_CHECKING:
    from jdist.core.replica_mesh import Device
    from jdist.core.strategy import Strategy

# Options of strategies that say where they run.
_PLACES = ("devices", "device", "topology", "name", "cluster")
KNOWN = (
    'a TPU such as "v5e:2x4", "v5e-16" or "v5p:8x8x8,slices=2"; GPUs such as "h100:8" or, on four hosts, "h100:4x8"; "cpu:8"; '
    '"gpu" or "gpu:4" for those that are here'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The devices to compile for."""

    name: str  # the argument, "v5p:8x8x8"
    platform: str  # "tpu", "cpu" or "gpu"
    count: int | None = None  # number of devices; None for all that are here, or for a topology, which has it

    @property
    def is_here(self) -> bool:
        """Returns whether the devices are here, so that a step can also be run."""
        return self.name.partition(":")[0] in ("cpu", "gpu")

    @property
    def gpus_per_host(self) -> int | None:
        """GPUs of a host that is not here; None for other devices."""
        return self.domain_chips if self.platform == "gpu" else None

    @property
    def domain_chips(self) -> int | None:
        """Number of chips that the fast links join, where the topology says so; None: as many as they join at most."""
        if self.is_here:
            return None
        from jdist.strategies.topology import parse_topology

        return parse_topology(self.name).domain_chips


def parse_target(name: str) -> Target:
    """Reads "cpu:8", "gpu", "gpu:4", or a topology of TPUs or GPUs; starts no JAX devices."""
    match = re.fullmatch(r"(cpu|gpu)(?::([1-9]\d*))?", name)
    if match and match[1] == "cpu" and int(match[2] or 0) > MOST_CPU_DEVICES:
        raise DeviceError(
            f"--topology is {name!r}; a process has at most {MOST_CPU_DEVICES:,} virtual CPU devices, beyond which JAX takes "
            f"them for another process's. Write cpu:{MOST_CPU_DEVICES} or less, or a TPU such as v5p:16x16x16 for more."
        )
    if match:
        return Target(name=name, platform=match[1], count=int(match[2]) if match[2] else None)
    from jdist.strategies.topology import is_by_size, nearest, parse_topology

    if name.lower().startswith(("cpu", "gpu")) or not (":" in name or is_by_size(name)):
        hint = did_you_mean(name, ["cpu:8", "gpu"]) or nearest(name)
        raise DeviceError(f"--topology is {name!r}; it must be {KNOWN}.{hint}")
    return Target(name=name, platform=parse_topology(name).platform)


def configure_platform(target: Target, section: PlatformSection) -> None:
    """Configures JAX before it starts, by a config's `platform` section, with the target's number of virtual CPU devices."""
    if target.platform == "gpu" and target.is_here:
        apply_platform(section.model_copy(update={"cpu_devices": None}))
    elif "jax" not in sys.modules or not _started_with(target):
        # The compiler of devices that are not here runs on this machine's CPU, whatever else is here.
        apply_platform(section.model_copy(update={"cpu_devices": target.count or 1}))


def _started_with(target: Target) -> bool:
    """Returns whether JAX is on CPU already, with enough devices, as in a notebook or a test."""
    flags = os.environ.get("XLA_FLAGS", "")
    match = re.search(r"--xla_force_host_platform_device_count=(\d+)", flags)
    enough = int(match[1]) if match else 1
    return os.environ.get("JAX_PLATFORMS") == "cpu" and enough >= (target.count or 1)


def find_target_devices(target: Target) -> tuple[Device, ...]:
    """Finds the devices of a target, in the order of a mesh over them."""
    if not target.is_here:
        from jdist.strategies.topology import topology_devices

        return topology_devices(target.name)
    import jax

    try:
        devices = jax.local_devices(backend=target.platform)
    except RuntimeError as exc:
        reason = str(exc).partition("\n")[0]
        raise DeviceError(f"--topology {target.name}: JAX finds no {target.platform} here: {reason}.") from exc
    if len(devices) < (target.count or 1):
        raise DeviceError(
            f"--topology {target.name}: there are only {len(devices)} {target.platform} devices here. "
            f"Write {target.platform}:{len(devices)} or less."
        )
    return tuple(devices[: target.count])


def strategy_on(target: Target, devices: tuple[Device, ...], name: str, /, **options: Any) -> Strategy:
    """Makes a config's strategy on a target's devices; options that name devices are dropped."""
    # If the devices are not here, the strategy can only compile.
    from jdist.strategies.by_name import STRATEGIES
    from jdist.strategies.multi_worker import multi_worker_on

    # On chosen devices `tpu` is `mirrored`.
    on_devices = {"tpu": STRATEGIES["mirrored"], "multi_worker": multi_worker_on}
    function = on_devices.get(name, STRATEGIES[name])
    others = {k: v for k, v in options.items() if k not in _PLACES and v is not None}
    parameters = inspect.signature(function).parameters
    if "devices" in parameters:
        strategy = function(devices=devices, **others)
    elif "device" in parameters:
        strategy = function(device=devices[0], **others)
    elif target.is_here:
        strategy = function(**others)
    else:
        raise StrategyError(
            f"strategy {name!r} takes no devices, so none that are not here; use strategy.name=mirrored"
        )
    if target.is_here:
        return strategy
    if strategy.transform == "pmap":
        raise StrategyError('`transform` is "pmap", which JAX compiles only for devices that are here; say "shard_map"')
    return dataclasses.replace(strategy, topology=target.name)
