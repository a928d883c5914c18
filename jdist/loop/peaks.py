"""The peaks of a run's devices: the most memory that was in use, and the time of a step at the maker's peak."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import jax

from jdist.core.remote import shapes_of
from jdist.core.sharded_leaf import map_leaves
from jdist.core.step_state import user_state
from jdist.core.strategy import Device, Strategy
from jdist.jaxpr.flops import is_countable, products_of
from jdist.step.base import Distributed
from jdist.step.mesh_step import DistributedStep
from jdist.strategies.default import default
from jdist.support.chips import Chip, chip_of

PyTree = Any


def peak_memory_bytes(strategy: Strategy) -> int | None:
    """Reads the peak memory of the fullest of this process's devices; None if unknown."""
    # CPU devices keep arrays in the process's own memory: it is the peak of the process's resident
    # memory. A parameter server has none: its state and steps are in other processes.
    if strategy.coordinator is not None:
        return None
    devices = _local_devices(strategy)
    if all(device.platform == "cpu" for device in devices):
        return _peak_resident_bytes()
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return max((peak for peak in peaks if peak is not None), default=None)


def _local_devices(strategy: Strategy) -> list[Device]:
    here = jax.process_index()
    return [device for device in strategy.devices if device.process_index == here] or jax.local_devices()


def _peak_resident_bytes() -> int | None:
    try:  # `ru_maxrss` of Linux is never below that of the process which started this one
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        # Kilobytes, of macOS bytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def ideal_step_s(train_step: Distributed, state: PyTree, batch: PyTree) -> float | None:
    """Computes the time of a step's matrix products at the chips' peak; None if that is unknown."""
    # The step is traced as one replica that sees the full batch, as `jdist plan` counts it:
    # products that replicas repeat do not count, those that `jax.checkpoint` repeats do.
    devices = train_step.strategy.devices or _devices_of(state)
    chip = peak_of(devices[0]) if devices else None
    if chip is None:
        return None
    state = map_leaves(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), user_state(shapes_of(state)))
    if train_step.options.steps_per_call > 1:
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    step, arguments = train_step.pure((state, batch))
    if not isinstance(step, DistributedStep):
        return None
    one = step.like(default(), accumulate=1, steps_per_call=1, donate=False, verify="off")
    try:
        closed = one.jaxpr(*arguments)
    # The user's code, on other shapes than it trains on: it may name the replicas' axis, or assert how many rows a replica has.
    except Exception:  # noqa: BLE001
        return None
    products = products_of(closed)
    if not products or not is_countable(closed):
        return None
    return chip.compute_s({kind: flops / len(devices) for kind, flops in products.items()})


def peak_of(device: Device) -> Chip | None:
    """Finds the maker's figures of a device's chip; None if they are not known."""
    return None if device.platform == "cpu" else chip_of(device.device_kind)


def _devices_of(state: PyTree) -> tuple[Device, ...]:
    """Finds the devices that a state lies on, under a strategy that names none."""
    arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    return tuple(arrays[0].sharding.device_set) if arrays else ()
