"""Leaves of a state in a checkpoint: their description, copy to the host, comparison and placement."""

from __future__ import annotations

import math
from typing import Any

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


def to_host(leaf: Any, *, is_chief: bool) -> LocalLeaf:
    """Copies this process's part of a leaf to the host: the shards with replica id 0."""
    # Nobody else has the copies: a view of a CPU buffer would make the next step's donation copy
    # instead.
    if is_sharded_leaf(leaf):
        return _in_parts(leaf)
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return _whole(leaf, is_chief)
    if leaf.is_fully_replicated and any(device.process_index == 0 for device in leaf.sharding.device_set):
        return _whole(leaf, is_chief)
    return LocalLeaf(leaf.shape, np.dtype(leaf.dtype), _own_boxes(leaf))


def _own_boxes(array: jax.Array) -> list[Box]:
    return [Box(tuple(each.start or 0 for each in index), np.array(data)) for index, data in _own_shards(array)]


def _own_shards(array: jax.Array) -> list[tuple[tuple[slice, ...], jax.Array]]:
    """Begins to fetch this process's shards with replica id 0; each comes with its place."""
    own = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    shards = [(shard.index, _anew(shard.data)) for shard in own]
    for _, data in shards:
        data.copy_to_host_async()
    return shards


def _anew(data: jax.Array) -> jax.Array:
    """Makes another `jax.Array` of a buffer: an array keeps what was fetched of it, a second copy on the host."""
    return jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])


def _in_parts(leaf: ShardedLeaf) -> LocalLeaf:
    """Copies this process's parts of an array in parts, without padding."""
    boxes: list[Box] = []
    in_a_row = leaf.stored.ndim != leaf.ndim
    for start, values in _own_boxes(leaf.stored):
        if in_a_row:
            first = start[0] * math.prod(values.shape[1:])
            boxes += boxes_of_elements(leaf.shape, first, values.reshape(-1)[: max(0, leaf.size - first)])
            continue
        real = values[tuple(slice(max(0, size - first)) for first, size in zip(start, leaf.shape, strict=True))]
        boxes += [Box(start, real)] if real.size else []
    return LocalLeaf(leaf.shape, np.dtype(leaf.dtype), boxes)


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


def _whole(leaf: Any, is_chief: bool) -> LocalLeaf:
    leaf = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    boxes = [Box((0,) * leaf.ndim, _host_copy(leaf))] if is_chief else []
    return LocalLeaf(leaf.shape, np.dtype(leaf.dtype), boxes)


def _host_copy(leaf: Any) -> np.ndarray:
    if not isinstance(leaf, jax.Array):
        return np.array(leaf, order="C")
    copy = np.empty(leaf.shape, leaf.dtype)
    if leaf.is_fully_replicated:
        copy[...] = np.asarray(_anew(leaf.addressable_data(0)))
    else:
        for index, data in _own_shards(leaf):
            copy[index] = np.asarray(data)
    return copy


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
