"""Collectives on the host, of what replicas hold: `strategy.local_results`, `gather` and `reduce`.

All of it runs outside every step, on numpy copies; inside a step there are `jdist.all_reduce` and `jdist.all_gather`. The
meaning is `tf.distribute.Strategy`'s. With several processes `gather` and `reduce` exchange what their replicas hold, so all
of them have to call; `local_results` exchanges nothing.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jdist.core.per_replica import PerReplica, as_axis, is_per_replica, is_rows_of_replicas, named
from jdist.core.replica_mesh import ReplicaMesh
from jdist.errors import StepError
from jdist.support import checks
from jdist.support.arrays import check_not_donated, is_key, local_rows, promote_types, to_host
from jdist.typing import PyTree

HostReduceOp = Literal["mean", "sum", "MEAN", "SUM"]  # the latter are TensorFlow's


def local_results(value: PyTree, mesh: ReplicaMesh) -> tuple[PyTree, ...]:
    """Splits a value into this process's replicas' versions: `Strategy.local_results`."""
    check_not_donated(value, "the value")
    nodes, treedef = jax.tree.flatten(value, is_leaf=is_per_replica)
    parts = [_local_parts(node, mesh) for node in nodes]
    if all(part is None for part in parts):
        return (jax.tree.map(to_host, value),)
    # With `accumulate` each microbatch has a version of its own.
    count = max(len(mesh.local_replicas), *(len(part) for part in parts if part is not None))
    if any(part and len(part) != count for part in parts):
        raise StepError(
            f"strategy.local_results: some values have {count} versions, others fewer; take those of steps with another "
            "`accumulate` one by one."
        )
    whole = [part or (to_host(node),) * count for node, part in zip(nodes, parts, strict=True)]
    return tuple(jax.tree.unflatten(treedef, [part[i] for part in whole]) for i in range(count))


def gather(value: PyTree, axis: int, mesh: ReplicaMesh) -> PyTree:
    """Concatenates the replicas' arrays: `Strategy.gather`."""
    axis = as_axis("strategy.gather", axis)
    check_not_donated(value, "the value")

    def concatenate(name: str, arrays: tuple[Any, ...]) -> Any:
        shapes = [array.shape for array in arrays]
        if any(len(shape) == 0 for shape in shapes):
            raise StepError(
                f"strategy.gather: {name} is a scalar on each replica and has no axis to concatenate along. "
                "Return `x[None]`, or take `strategy.local_results(value)`."
            )
        if any(not -len(shape) <= axis < len(shape) for shape in shapes):
            raise StepError(f"strategy.gather: {name} has shape {shapes[0]} and no axis {axis}.")
        others = [np.delete(shape, axis).tolist() for shape in shapes]
        if any(other != others[0] for other in others):
            raise StepError(
                f"strategy.gather: {name} has the shapes {', '.join(map(str, shapes))}; they may differ on axis {axis} only."
            )
        return (jnp if is_key(arrays[0]) else np).concatenate(arrays, axis)

    def one(outer: Any, node: PyTree) -> PyTree:
        parts = _parts(node, mesh, "strategy.gather")
        if parts is None:
            if mesh.num_replicas > 1:
                raise StepError(
                    "strategy.gather: the value is not a PerReplica, so it is the same on all replicas and there is nothing to "
                    "concatenate. Pass what `strategy.run` returned, or `jdist.PerReplica.of([...])`."
                )
            parts = (to_host(node),)
        return jax.tree_util.tree_map_with_path(lambda path, *xs: concatenate(named(outer + path), xs), *parts)

    return jax.tree_util.tree_map_with_path(one, value, is_leaf=is_per_replica)


def reduce(op: HostReduceOp, value: PyTree, axis: int | tuple[int, ...] | None, mesh: ReplicaMesh) -> PyTree:
    """Reduces the replicas' arrays to one: `Strategy.reduce`."""
    others = 'For others take `strategy.local_results(value)`, or `jdist.all_reduce(x, "max")` on the replicas.'
    checks.choice("op", op, get_args(HostReduceOp), StepError, call="strategy.reduce", fix=others)
    axes = _as_axes(axis)
    check_not_donated(value, "the value")

    def one(outer: Any, node: PyTree) -> PyTree:
        parts = _parts(node, mesh, "strategy.reduce") or (to_host(node),)
        return jax.tree_util.tree_map_with_path(
            lambda path, *xs: _reduce_arrays(op.lower(), xs, axes, named(outer + path)), *parts
        )

    return jax.tree_util.tree_map_with_path(one, value, is_leaf=is_per_replica)


def _as_axes(axis: Any) -> tuple[int, ...] | None:
    if axis is None:
        return None
    axes = axis if isinstance(axis, tuple) else (axis,)
    if any(checks.as_int(a) is None for a in axes):
        raise StepError(f"strategy.reduce: `axis` is {axis!r}; it must be None, an int or a tuple of ints.")
    if not axes:
        raise StepError(
            "strategy.reduce: `axis` is (), which names no axis; name one or more, or leave it out (None) to reduce over the "
            "replicas alone."
        )
    return tuple(int(a) for a in axes)


def _reduce_arrays(op: str, arrays: tuple[Any, ...], axes: tuple[int, ...] | None, name: str) -> np.ndarray:
    """Sums or averages one leaf over the replicas, and over `axes` of each replica's array."""
    if any(is_key(array) for array in arrays):
        raise StepError(f"strategy.reduce: {name} is a PRNG key, which has no {op}.")
    dtype = jnp.result_type(*arrays)
    is_exact = not jnp.issubdtype(dtype, jnp.inexact)
    # As NumPy and JAX have it: a sum of bools counts, small integers add up in 32 bits; a mean of integers is floating point.
    at_least = jnp.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int32
    out = (jnp.float32 if op == "mean" else promote_types(dtype, at_least)) if is_exact else dtype
    wide = np.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else np.float64
    parts = [array.astype(out if is_exact and op == "sum" else wide) for array in arrays]
    count = len(arrays)
    if axes is not None:
        for array in arrays:
            if any(not -array.ndim <= a < array.ndim for a in axes) or len({a % array.ndim for a in axes}) < len(axes):
                raise StepError(
                    f"strategy.reduce: {name} has shape {array.shape}; `axis` {axes} must name axes of it, each once."
                )
        count = sum(math.prod(array.shape[a] for a in axes) for array in arrays)
        parts = [part.sum(axis=axes, dtype=part.dtype) for part in parts]
    shapes = ", ".join(str(array.shape) for array in arrays)
    if any(part.shape != parts[0].shape for part in parts):
        raise StepError(
            f"strategy.reduce: {name} has the shapes {shapes} on the replicas; all axes but `axis` {axes} must have "
            "equal sizes. To reduce over sizes that differ, name their axis."
        )
    total = np.stack(parts).sum(axis=0, dtype=parts[0].dtype)
    if op == "sum":
        return np.asarray(total, out)
    if count == 0:
        raise StepError(f"strategy.reduce: {name} is empty on every replica (shapes {shapes}) and has no mean.")
    return np.asarray(total / count, out)


def _parts(node: Any, mesh: ReplicaMesh, call: str) -> tuple[PyTree, ...] | None:
    """Splits a `PerReplica` or a distributed batch's leaf into the replicas' parts, on the host; None for all else."""
    if isinstance(node, PerReplica):
        # A tree without leaves has no number of versions.
        parts = node.all_results() or (node.value,) * mesh.num_replicas
        if len(parts) % mesh.num_replicas:
            raise StepError(
                f"{call}: a PerReplica value holds {len(parts)} versions; the strategy has {mesh.num_replicas} replicas, and "
                "it needs one for each, or for each of their microbatches."
            )
        return parts
    is_by_rows = is_rows_of_replicas(node, mesh.batch_sharding, call)
    return _split(to_host(node), mesh.num_replicas) if is_by_rows else None


def _local_parts(node: Any, mesh: ReplicaMesh) -> tuple[PyTree, ...] | None:
    """Splits as `_parts`, for this process's replicas."""
    call = "strategy.local_results"
    leaves = jax.tree.leaves(node.value) if isinstance(node, PerReplica) else []
    if any(is_rows_of_replicas(x, mesh.batch_sharding, call) for x in leaves):
        return node.local_results()
    if is_rows_of_replicas(node, mesh.batch_sharding, call):
        return _split(local_rows(node), len(mesh.local_replicas))
    parts = _parts(node, mesh, call)  # on the host, or the same on all: nothing to exchange
    if parts is None:
        return None
    each = len(parts) // mesh.num_replicas
    return tuple(parts[i * each + m] for i in mesh.local_replicas for m in range(each))


def _split(rows: Any, count: int) -> tuple[Any, ...]:
    size = rows.shape[0] // count
    return tuple(rows[i * size : (i + 1) * size] for i in range(count))
