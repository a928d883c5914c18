"""Leaves of a state in a checkpoint: their description, copy to the host, comparison and placement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist.checkpoint.pieces import Box, Extent, LocalLeaf
from jdist.core.sharded_leaf import ShardedLeaf, is_sharded_leaf, spread_like
from jdist.core.step_state import StepState
from jdist.errors import CheckpointError, DonatedStateError
from jdist.support.arrays import is_key, put
from jdist.typing import PyTree

CARRIED = _RESIDUALS, _LOSS_SCALE, _KEPT = "residuals of ", "loss scale", "kept "
SCALARS = (bool, int, float, complex)


def flatten(tree: PyTree) -> dict[str, Any]:
    """Lists the leaves of a tree by path; those of a `StepState` as of the user's state, and its others by prefix."""
    if isinstance(tree, StepState):
        carried = ((_LOSS_SCALE, tree.loss_scale), (_RESIDUALS, tree.residuals), (_KEPT, tree.kept))
        added = {f"{prefix}{path}": leaf for prefix, part in carried for path, leaf in flatten(part).items()}
        return {**flatten(tree.user), **added}
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sharded_leaf)
    flat = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    if len(flat) != len(leaves):
        raise CheckpointError("two leaves of the tree have the same path; give its nodes distinct keys")
    return flat


def describe_leaf(path: str, leaf: Any) -> dict[str, Any]:
    """Describes a leaf as the manifest does; the dtype of a Python number is "python int" or the like."""
    if type(leaf) in SCALARS:
        return {"path": path, "shape": [], "dtype": f"python {type(leaf).__name__}"}
    if isinstance(leaf, (jax.Array, ShardedLeaf, jax.ShapeDtypeStruct, np.ndarray, np.generic)):
        known = is_key(leaf) or jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == np.bool_
        if known:
            impl = {"key": str(jax.random.key_impl(leaf))} if is_key(leaf) and isinstance(leaf, jax.Array) else {}
            return {"path": path, "shape": list(leaf.shape), "dtype": str(leaf.dtype), **impl}
    dtype = getattr(leaf, "dtype", "")
    raise CheckpointError(
        f"leaf {path} is a {type(leaf).__name__} {dtype}: only arrays, PRNG keys and numbers are saved"
    )


def check_savable(path: str, leaf: Any, num_processes: int) -> None:
    """Raises a `CheckpointError`, or a `DonatedStateError`, for a leaf that cannot be saved."""
    describe_leaf(path, leaf)
    if is_sharded_leaf(leaf):
        leaf = leaf.stored
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise CheckpointError(f"leaf {path} is a ShapeDtypeStruct, which has no value to save")
    if isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
        raise CheckpointError(f"leaf {path} is {leaf}: an integer must fit in 64 bits")
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise DonatedStateError(
                f"leaf {path} was donated to a step already: save the state that the step returned; `donate=False` keeps old "
                "states usable"
            )
        if num_processes == 1 and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            text = "is spread over processes, and each must save its part: pass `cluster=strategy.cluster`"
            raise CheckpointError(f"leaf {path} {text}. Its sharding is {leaf.sharding}")


def without_keys(leaf: Any) -> Any:
    """Converts PRNG keys to their data; other leaves stay."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


class HostMemory:
    """Memory for the host copies of one save at a time; the next save finds its pages mapped."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def arrays(self, kinds: Sequence[tuple[tuple[int, ...], np.dtype]]) -> Iterator[np.ndarray]:
        """Yields arrays of these shapes and dtypes, not set; they take the memory of those of the call before."""
        sizes = [-(-math.prod(shape) * dtype.itemsize // 64) * 64 for shape, dtype in kinds]  # aligned
        if self._bytes.size != sum(sizes):
            self._bytes = np.empty(0, np.uint8)  # released before the new memory is allocated
            self._bytes = np.empty(sum(sizes), np.uint8)
        for (shape, dtype), offset in zip(kinds, itertools.accumulate(sizes, initial=0), strict=False):
            yield np.ndarray(shape, dtype, self._bytes, offset)


class _Part(NamedTuple):
    """A box of a leaf that this process copies, and the arrays that make it, each with its place in the box."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    sources: Sequence[tuple[Any, Any]]
    on_host: bool  # NumPy views the arrays without a copy

    @property
    def is_fetched(self) -> bool:
        """Returns whether one transfer makes the host copy of the box."""
        return not self.on_host and len(self.sources) == 1

    def begun(self) -> _Part:
        return self._replace(sources=_fetch(self.sources)) if self.is_fetched else self

    def copy(self, copies: Iterator[np.ndarray]) -> Box:
        """Copies the box, into the next of `copies` unless a transfer makes the copy."""
        if self.is_fetched:
            return Box(self.start, np.asarray(self.sources[0][1]))
        copy = next(copies)
        for place, source in self.sources if self.on_host else _fetch(self.sources):
            copy[place] = np.asarray(source)
        return Box(self.start, copy)


def to_host(leaves: Iterable[Any], memory: HostMemory, *, is_chief: bool) -> list[LocalLeaf]:
    """Copies this process's parts of leaves to the host, into `memory` unless a transfer makes the copy."""
    # Nobody else has the copies: a view of a CPU buffer would make the next step's donation copy
    # instead.
    leaves = [leaf if is_sharded_leaf(leaf) or isinstance(leaf, jax.Array) else np.asarray(leaf) for leaf in leaves]
    parts = [_parts(leaf, is_chief) for leaf in leaves]
    # All transfers begin before the first wait, except those of shards, which need a second copy.
    parts = [[part.begun() for part in each] for each in parts]
    copied = [part for each in parts for part in each if not part.is_fetched]
    copies = memory.arrays([(part.shape, part.sources[0][1].dtype) for part in copied])
    return [
        LocalLeaf(leaf.shape, np.dtype(leaf.dtype), [b for part in each for b in _real(leaf, part.copy(copies))])
        for leaf, each in zip(leaves, parts, strict=True)
    ]


def _parts(leaf: Any, is_chief: bool) -> list[_Part]:
    """Lists the boxes that this process copies of a leaf, the shards with replica id 0; of one in parts with padding."""
    array = leaf.stored if is_sharded_leaf(leaf) else leaf
    origin = (0,) * array.ndim
    if not isinstance(array, jax.Array):
        return [_Part(origin, array.shape, [(..., array)], True)] if is_chief else []
    devices = array.sharding.device_set
    on_host = array.sharding.memory_kind != "device" or next(iter(devices)).platform == "cpu"
    # NumPy makes a copy of elements of less than a byte.
    on_host = on_host and (array.dtype.itemsize > 1 or jax.dtypes.itemsize_bits(array.dtype) == 8)
    on_chief = array.is_fully_replicated and any(device.process_index == 0 for device in devices)
    is_whole = not is_sharded_leaf(leaf) and (array.is_fully_addressable or on_chief)
    if is_whole and array.is_fully_replicated:
        return [_Part(origin, array.shape, [(..., array.addressable_data(0))], on_host)] if is_chief else []
    shards = [(each.index, each.data) for each in array.addressable_shards if each.replica_id == 0]
    if is_whole:
        return [_Part(origin, array.shape, shards, on_host)] if is_chief else []
    starts = [tuple(each.start or 0 for each in index) for index, _ in shards]
    return [_Part(start, data.shape, [(..., data)], on_host) for start, (_, data) in zip(starts, shards, strict=True)]


def _fetch(sources: Iterable[tuple[Any, jax.Array]]) -> Sequence[tuple[Any, jax.Array]]:
    """Begins to fetch arrays by others with the same buffers: an array keeps a copy of what was fetched of it."""
    fresh = [(place, jax.make_array_from_single_device_arrays(x.shape, x.sharding, [x])) for place, x in sources]
    for _, array in fresh:
        array.copy_to_host_async()
    return fresh


def _real(leaf: Any, stored: Box) -> list[Box]:
    """Cuts a box of the stored array to boxes of the leaf, without padding."""
    start, values = stored
    if not is_sharded_leaf(leaf):
        return [stored]
    if leaf.stored.ndim != leaf.ndim:
        first = start[0] * math.prod(values.shape[1:])
        return boxes_of_elements(leaf.shape, first, values.reshape(-1)[: max(0, leaf.size - first)])
    real = values[tuple(slice(max(0, size - first)) for first, size in zip(start, leaf.shape, strict=True))]
    return [Box(start, real)] if real.size else []


def boxes_of_elements(shape: tuple[int, ...], first: int, values: np.ndarray) -> list[Box]:
    """Cuts successive elements of an array in row-major order, from number `first` on, into boxes of it."""
    if len(shape) < 2:
        return [Box((first,), values)] if values.size else []
    size = math.prod(shape[1:])
    row, offset = divmod(first, size)
    boxes: list[Box] = []
    while values.size:
        count = (values.size // size if not offset else 0) * size or min(size - offset, values.size)
        now, values = values[:count], values[count:]
        if count % size:
            inner = boxes_of_elements(shape[1:], offset, now)
            boxes += [Box((row, *start), box[None]) for start, box in inner]
        else:
            boxes.append(Box((row, *(0,) * (len(shape) - 1)), now.reshape(-1, *shape[1:])))
        row, offset = row + max(1, count // size), 0
    return boxes


def needed(like: Any) -> list[Extent] | None:
    """Finds the boxes of a leaf that this process's devices take of it when it is placed; None: all of it."""
    kept = like.stored if is_sharded_leaf(like) else like
    sharding = getattr(kept, "sharding", None)
    if sharding is None or sharding.is_fully_addressable or sharding.is_fully_replicated or is_key(like):
        return None
    extents: list[Extent] = []
    for index in sharding.addressable_devices_indices_map(kept.shape).values():
        bounds = [each.indices(size)[:2] for each, size in zip(index, kept.shape, strict=True)]
        if kept.ndim == like.ndim:
            extents.append(bounds)
            continue
        first, last = (min(bound * math.prod(kept.shape[1:]), like.size) for bound in bounds[0])
        for start, box in boxes_of_elements(like.shape, first, np.broadcast_to(np.int8(0), last - first)):
            extents.append([(a, a + size) for a, size in zip(start, box.shape, strict=True)])
    return extents


def place(path: str, array: np.ndarray, key: str | None, like: Any) -> Any:
    """Makes a leaf like `like` of a saved value; `key` is its kind, of a PRNG key."""
    if type(like) in SCALARS:
        return type(like)(_cast(path, array, np.array(like).dtype).item())
    if is_sharded_leaf(like):
        return spread_like(_cast(path, array, like.dtype), like)
    # A leaf that JAX may place stays so: on a fixed device the first two steps would compile.
    is_free = isinstance(like, jax.Array) and not like.committed
    sharding = None if is_free or isinstance(like, np.ndarray | np.generic) else like.sharding
    if key is not None:
        return put(jax.random.wrap_key_data(jnp.asarray(array), impl=key), sharding)
    array = _cast(path, array, like.dtype)
    if isinstance(like, (np.ndarray, np.generic)):
        return array if isinstance(like, np.ndarray) else array[()]
    if like.weak_type and array.shape == ():
        # A Python number has a weak type; without one the resumed step compiles a second time.
        weak = put(array.item(), sharding)
        if weak.dtype == like.dtype:
            return weak
    return put(array, sharding)


def _cast(path: str, array: np.ndarray, dtype: Any) -> np.ndarray:
    """Converts a saved Python number, or the value for one; a float is rounded, as JAX does with one."""
    if array.dtype == dtype:
        return array
    converted = array.astype(dtype)
    rounded = jnp.issubdtype(array.dtype, np.inexact) and jnp.issubdtype(dtype, np.inexact)
    if not rounded and converted.astype(array.dtype).tobytes() != array.tobytes():
        raise CheckpointError(f"leaf {path}: saved {array.dtype} {array}, which {dtype} cannot hold exactly")
    return converted
