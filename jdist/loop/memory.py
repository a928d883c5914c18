"""The memory of a run's devices: its peak, and the arrays that were there when it did not suffice."""

from __future__ import annotations

import contextlib
import math
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jdist.core.layout import HOST_MEMORIES
from jdist.core.replica_mesh import Device
from jdist.core.sharded_leaf import is_sharded_leaf
from jdist.core.strategy import Strategy
from jdist.errors import LiveLeaf, OutOfMemoryError
from jdist.support.arrays import is_key
from jdist.support.words import counted, size
from jdist.typing import PyTree

_LISTED = 10
# As accelerators say it, and CPU devices; other resources than memory are a message that is too long, or a quota.
_NO_MEMORY = re.compile(r"RESOURCE_EXHAUSTED: *(.*(?i:memory|alloc).*)|.*(Out of memory allocating .*)")


@contextlib.contextmanager
def naming_leaves(trees: Callable[[], Mapping[str, PyTree]]) -> Iterator[None]:
    """Translates the error of a device without memory; `trees` gives the run's arrays."""
    try:
        yield
    except jax.errors.JaxRuntimeError as exc:
        raise_out_of_memory(exc, trees())
        raise


def raise_out_of_memory(error: Exception, trees: Mapping[str, PyTree]) -> None:
    """Raises an `OutOfMemoryError` that names the largest leaves of these trees, if that is what the error says."""
    found = _NO_MEMORY.search(str(error))
    if found is None:
        return
    reason = (found[1] or found[2] or "").rstrip(". ")
    leaves = live_leaves(trees)
    held = sum(leaf.bytes_per_device for leaf in leaves)
    width = max((len(leaf.path) for leaf in leaves[:_LISTED]), default=0)
    listed = "".join(
        f"  {leaf.path:<{width}}  {leaf.array}  {size(leaf.bytes_per_device)} a device\n" for leaf in leaves[:_LISTED]
    )
    raise OutOfMemoryError(
        f"a device has no memory left: {reason}. In use were {counted(len(leaves), 'array')} with {size(held)} a "
        f"device, the largest of them:\n{listed}The rest holds intermediate results of the step. Less is needed with a "
        'smaller `global_batch`, `accumulate=2`, `precision="bf16"`, `jax.checkpoint` in the model, or a state in parts, '
        '`shard="state"`; `jdist plan` counts it before a run.',
        tuple(leaves),
    ) from error


def live_leaves(trees: Mapping[str, PyTree]) -> list[LiveLeaf]:
    """Lists the arrays of trees, and this process's others, by their bytes on a device."""
    # Arrays that the failed call has consumed count as well: they were there.
    found: dict[int, LiveLeaf] = {}
    for name, tree in trees.items():
        for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_sharded_leaf):
            array = leaf.stored if is_sharded_leaf(leaf) else leaf
            if isinstance(array, jax.Array) and not _is_on_host(array):
                entry = _describe(f"{name}{jax.tree_util.keystr(path)}", leaf.shape, array)
                found.setdefault(id(array), entry)
    for array in jax.live_arrays():
        if id(array) not in found and not _is_on_host(array):
            found[id(array)] = _describe("(outside of the run)", array.shape, array)
    return sorted(found.values(), key=lambda leaf: -leaf.bytes_per_device)


def _is_on_host(array: jax.Array) -> bool:
    """Returns whether an array lies in the memory of an accelerator's host."""
    device = next(iter(array.sharding.device_set))
    return device.platform != "cpu" and array.sharding.memory_kind in HOST_MEMORIES


def _describe(path: str, shape: tuple[int, ...], array: jax.Array) -> LiveLeaf:
    aval: Any = jax.eval_shape(jax.random.key_data, array) if is_key(array) else array
    part = array.sharding.shard_shape(array.shape)
    elements = math.prod(aval.shape[len(array.shape) :]) * math.prod(part)
    return LiveLeaf(path, tuple(shape), str(array.dtype), elements * aval.dtype.itemsize)


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
