"""What a step may call: means and collectives over the replicas that run it; its gradients are in `gradients.py`.

Outside a strategy every function here is plain JAX or the identity, so one step serves everywhere. The mesh axes
come from JAX itself (the manual axes of the current mesh), cut down to those of the current strategy.

Under `transform="jit"` a step sees the whole batch at once (the *global view*). What a mean over replicas gives is
there already; a call that needs single replicas has no meaning and raises `GlobalViewError` when traced.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jdist import context
from jdist.errors import GlobalViewError, StepError, StrategyError
from jdist.near import did_you_mean
from jdist.reducible import as_array, as_arrays, as_axis, check_numbers, countable, floating
from jdist.reduction import psum
from jdist.reduction.algorithm import apply_reduction, axes_size

PyTree = Any
ReduceOp = Literal["mean", "sum", "max", "min"]


def replica_axes() -> tuple[str, ...] | None:
    """The mesh axes that replicas are spread over, for `BatchNorm(axis_name=...)` and collectives of your own.

    It is known inside of a step alone, where a linen model makes its layers. An nnx layer is made before: it takes
    `axis_name=strategy.axes`, as with None it would normalise each replica's rows by themselves.

    Returns:
        The names, or None where no replica axis is bound: under default, outside a step, in the global view.
    """
    trace = context.current_trace()
    strategy = trace.strategy if trace else context.current_strategy()
    if strategy is None:
        return None
    bound = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in strategy.axes if axis in bound) or None


def num_replicas() -> int:
    """How many replicas run this step; 1 outside a mesh.

    Raises:
        GlobalViewError: the step sees the whole batch.
    """
    refuse_in_global_view("num_replicas()", "use `strategy.num_replicas` if the number of devices is meant")
    axes = replica_axes()
    return 1 if axes is None else axes_size(axes)


def replica_id() -> jax.Array:
    """This replica's number, int32 scalar in [0, num_replicas); 0 outside a mesh.

    Raises:
        GlobalViewError: the step sees the whole batch.
    """
    refuse_in_global_view("replica_id()", "the whole batch is one computation here, on no replica in particular")
    axes = replica_axes()
    return jnp.int32(0) if axes is None else jax.lax.axis_index(axes)


def replica_rng(key: jax.Array) -> jax.Array:
    """A key of this replica's own, so that dropout or noise differs from replica to replica.

    With `accumulate=k` it also differs from microbatch to microbatch. With one replica, in the global view, and outside
    a mesh it is `key` itself: one draw over the whole batch differs from row to row anyway.

    Args:
        key: a PRNG key, or an array of keys, the same on all replicas.

    Returns:
        Keys of the same shape.
    """
    trace = context.current_trace()
    if replica_axes() is not None and num_replicas() > 1:
        key = _fold_in(key, replica_id())
    recorder = gradient_recorder(trace)
    if recorder is not None and recorder.num_microbatches > 1:
        key = _fold_in(key, recorder.microbatch)
    return key


def _fold_in(key: jax.Array, number: jax.Array) -> jax.Array:
    own_axes = 0 if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else 1  # an old-style key is a row of uint32
    if key.ndim == own_axes:
        return jax.random.fold_in(key, number)
    rows = key.reshape(-1, *key.shape[key.ndim - own_axes :])
    return jax.vmap(jax.random.fold_in, (0, None))(rows, number).reshape(key.shape)


def all_reduce(tree: PyTree, op: ReduceOp = "mean") -> PyTree:
    """Reduces each leaf over the replicas; every replica receives the result.

    "mean" and "sum" are differentiable, with the meaning of `tf.distribute`'s all_reduce: the gradient of a sum is summed
    over replicas.

    Args:
        tree: pytree of arrays of the same shapes on every replica.
        op: "mean", "sum", "max" or "min".

    Returns:
        The reduced tree; outside a mesh the values as they are. A mean of integers is floating point, a sum of bools
        counts them in int32, everywhere.

    Raises:
        StepError: `op` is none of these, or a leaf has no such reduction.
        StrategyError: the strategy's algorithm claims to be exact and keeps something, or returned no sum of the tree.
        GlobalViewError: `op="sum"` in a step that sees the whole batch.
    """
    check_op(op, get_args(ReduceOp))
    if op == "sum":
        refuse_in_global_view(
            'all_reduce(..., "sum")',
            "a sum over the whole batch is `jnp.sum`, there is nothing left to add up",
        )
    tree = as_arrays("jdist.all_reduce", tree)
    check_numbers("jdist.all_reduce", op, tree)
    if op in ("mean", "sum"):
        tree = jax.tree.map(floating if op == "mean" else countable, tree)
    axes, trace = replica_axes(), context.current_trace()
    if axes is None:
        if trace is not None and op != "mean":
            tree = jax.tree.map(jnp.copy, tree)  # arrays of their own: what is noted is not the caller's argument
            note_reduced(trace, tree, op)
        return tree
    strategy = trace.strategy if trace else context.current_strategy()
    assert strategy is not None  # replica_axes() found its axes
    if op in ("max", "min"):
        collective = jax.lax.pmax if op == "max" else jax.lax.pmin
        reduced = jax.tree.map(lambda leaf: collective(leaf, axes), tree)
    else:
        # One that is not exact is for gradients; a single replica needs none.
        reduction = strategy.reduction if strategy.reduction.exact and num_replicas() > 1 else psum()
        carry = reduction.init(tree)
        if jax.tree.leaves(carry):
            raise StrategyError(
                f"all-reduce {reduction.name} keeps something from call to call (`init` returned arrays), which only one for "
                "gradients can: make it `Reduction(name, init, apply, exact=False)`, or let `init` return ()."
            )
        reduced, _ = apply_reduction(reduction, tree, carry, axes)
        if op == "mean":
            reduced = jax.tree.map(lambda leaf: leaf / num_replicas(), reduced)
    if trace is not None:
        note_reduced(trace, reduced, op)
    return reduced


def note_reduced(trace: context.ReplicaTrace, reduced: PyTree, op: str) -> None:
    leaves = jax.tree.leaves(reduced)
    trace.reduced.extend(leaves)
    trace.reduced_by.update((id(leaf), op) for leaf in leaves)


def all_gather(tree: PyTree, axis: int = 0) -> PyTree:
    """Concatenates each leaf over the replicas, in the order of `replica_id()`; differentiable.

    Args:
        tree: pytree of arrays of the same shapes on every replica, each of rank 1 or more.
        axis: the axis to concatenate along; negative counts from the end.

    Returns:
        The tree with `axis` grown by the factor `num_replicas()`; the identity outside a mesh.

    Raises:
        StepError: `axis` is no int, or a leaf has no such axis or is no array.
        GlobalViewError: the step sees the whole batch.
    """
    refuse_in_global_view("all_gather()", "the rows of the whole batch are here already")
    axis = as_axis("jdist.all_gather", axis)
    tree = as_arrays("jdist.all_gather", tree)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        rank = jnp.ndim(leaf)
        if not -rank <= axis < rank:
            raise StepError(
                f"jdist.all_gather: leaf {jax.tree_util.keystr(path) or 'value'} has shape {jnp.shape(leaf)} and no "
                f"axis {axis} to concatenate along. For one scalar a replica write `all_gather(x[None])`."
            )
    axes = replica_axes()
    if axes is None:
        return tree
    return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, axes, axis=axis % jnp.ndim(leaf), tiled=True), tree)


def mean(per_example: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """This replica's part of the mean over the global batch, padding left out.

    The mean over replicas of what this returns is the exact mean over all rows that count, wherever they are:
    `sum(mask * x) * N / psum(sum(mask))`. A mean of each replica's own mean is wrong as soon as one holds padding.

    Args:
        per_example: losses or metrics, shape [rows, ...].
        mask: bool, or float weights; shape [rows] or a longer prefix of `per_example`'s shape. None: all count.

    Returns:
        A scalar, float32 or wider. A batch in which nothing counts gives 0.

    Raises:
        StepError: the shape of `mask` is no prefix of the shape of `per_example`, or one of them holds no numbers.

    Example:
        >>> import jdist, jax.numpy as jnp
        >>> float(jdist.mean(jnp.array([1.0, 3.0, 100.0]), jnp.array([True, True, False])))
        2.0
    """
    values = as_array("jdist.mean", "`per_example`", per_example)
    check_numbers("jdist.mean", "mean", values)
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    if mask is None:
        return values.mean()
    mask = as_array("jdist.mean", "`mask`", mask)
    if mask.shape != values.shape[: mask.ndim]:
        raise StepError(
            f"jdist.mean: `mask` has shape {mask.shape}, `per_example` has shape {values.shape}; the mask's shape must "
            "be the beginning of the values' shape, usually [rows]."
        )
    weights = jnp.broadcast_to(mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim)), values.shape)
    if weights.dtype == jnp.bool_:
        total = jnp.where(weights, values, 0).sum()  # where, not *: an infinite loss on padding stays out
    else:
        total = jnp.where(weights != 0, weights * values, 0).sum()
    count = jax.lax.stop_gradient(weights.sum(dtype=values.dtype))
    axes, recorder = replica_axes(), gradient_recorder(context.current_trace())
    parts = 1 if axes is None else num_replicas()
    if recorder is not None:
        parts *= recorder.num_microbatches
        count = recorder.count(count)
    elif axes is not None:
        count = jax.lax.psum(count, axes)
    return total * (parts / jnp.where(count == 0, 1, count))


def check_op(op: str, allowed: tuple[str, ...]) -> None:
    """Refuses an `op` that is not allowed, by name."""
    if op not in allowed:
        raise StepError(f"`op` is {op!r}; allowed are {', '.join(map(repr, allowed))}.{did_you_mean(op, allowed)}")


def refuse_in_global_view(call: str, instead: str) -> None:
    """Refuses a call that means nothing where the step sees the whole batch; says what to write instead."""
    trace = context.current_trace()
    if trace is not None and trace.strategy.transform == "jit":
        raise GlobalViewError(
            f'jdist.{call} has no meaning under transform="jit", where a step sees the whole batch: {instead}. '
            'Or use transform="shard_map".'
        )


def gradient_recorder(trace: context.ReplicaTrace | None) -> context.Recorder | None:
    """The recorder of a step that is being cut at its gradients; None where it is not."""
    recorder = None if trace is None else trace.recorder
    return recorder if recorder is not None and recorder.at == "gradient" else None
