"""Means and collectives over the replicas that run a step; its gradients are in `gradients.py`.

Outside a strategy every function here is plain JAX or the identity, so one step serves everywhere. The mesh axes
come from JAX itself (the manual axes of the current mesh), cut down to those of the current strategy.

Under `transform="jit"` a step sees the whole batch at once (the *global view*): it is one replica, and every call here
means what it means on one device with the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jdist.core import context
from jdist.core.collective_marks import Collective, alone, emit, without_gradient
from jdist.core.per_replica import as_array, as_arrays, as_axis, check_numbers, countable, floating
from jdist.errors import StepError, StrategyError
from jdist.reduction.algorithm import apply_reduction, axes_size, psum
from jdist.support import checks
from jdist.support.arrays import is_key, promote_types
from jdist.typing import PyTree

ReduceOp = Literal["mean", "sum", "max", "min"]


def replica_axes() -> tuple[str, ...] | None:
    """Returns the mesh axes that replicas are spread over, for `BatchNorm(axis_name=...)` and collectives of your own.

    They are known inside a step alone, where a linen model makes its layers. An nnx layer is made before that: it takes
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
    """Counts the replicas that run this step, each microbatch as one; 1 outside a mesh and in the global view."""
    trace, axes = context.current_trace(), replica_axes()
    return (1 if axes is None else axes_size(axes)) * (1 if trace is None else trace.num_microbatches)


def replica_id() -> jax.Array:
    """Returns this replica's number, int32 scalar in [0, num_replicas); 0 outside a mesh and in the global view.

    Microbatch `m` of `k` on replica `r` of the mesh is replica `r * k + m`.
    """
    trace, axes = context.current_trace(), replica_axes()
    number = jnp.int32(0) if axes is None or axes_size(axes) == 1 else jax.lax.axis_index(axes)
    if trace is None or trace.microbatch is None:
        return number
    return number * trace.num_microbatches + trace.microbatch


def replica_rng(key: jax.Array) -> jax.Array:
    """Derives a key of this replica's own, so that dropout or noise differs from replica to replica.

    With `accumulate=k` it also differs from microbatch to microbatch. With one replica, in the global view, and outside
    a mesh it is `key` itself: one draw over the whole batch differs from row to row anyway.

    Args:
        key: a PRNG key, or an array of keys, the same on all replicas.

    Returns:
        Keys of the same shape.
    """
    return _fold_in(key, replica_id()) if num_replicas() > 1 else key


def _fold_in(key: jax.Array, number: jax.Array) -> jax.Array:
    own_axes = 0 if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else 1  # an old-style key is a row of uint32
    if key.ndim == own_axes:
        return jax.random.fold_in(key, number)
    rows = key.reshape(-1, *key.shape[key.ndim - own_axes :])
    return jax.vmap(jax.random.fold_in, (0, None))(rows, number).reshape(key.shape)


def all_reduce(tree: PyTree, op: ReduceOp = "mean") -> PyTree:
    """Reduces each leaf over the replicas; every replica receives the result.

    "mean" and "sum" are differentiable, with the meaning of `tf.distribute`'s all_reduce: the gradient of a sum is
    summed over replicas.

    Args:
        tree: pytree of arrays of the same shapes on every replica.
        op: "mean", "sum", "max" or "min".

    Returns:
        The reduced tree; outside a mesh the values unchanged. A mean of integers is floating point, a sum of bools
        counts them in int32, everywhere.

    Raises:
        StepError: `op` is not one of these, or a leaf has no such reduction; or a maximum or minimum is differentiated.
        StrategyError: the strategy's algorithm claims to be exact and keeps something, or did not return the sum of the tree.
    """
    checks.choice("op", op, get_args(ReduceOp), StepError)
    tree = as_arrays("jdist.all_reduce", tree)
    check_numbers("jdist.all_reduce", op, tree)
    if op in ("mean", "sum"):
        tree = jax.tree.map(floating if op == "mean" else countable, tree)
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, combine(Collective("value", op), leaves, by_strategy=True))


def combine(collective: Collective, leaves: Sequence[jax.Array], *, by_strategy: bool = False) -> list[jax.Array]:
    """Combines arrays over all replicas and microbatches, by an equation that can be found."""
    # With `by_strategy` the strategy's own all-reduce makes sums and means, if it is exact.
    axes, trace = replica_axes(), context.current_trace()
    k = 1 if trace is None else trace.num_microbatches
    mesh_size = 1 if axes is None else axes_size(axes)
    if trace is None and axes is None:
        return list(leaves)

    def body(*operands: jax.Array) -> Sequence[jax.Array]:
        # For operands that are the same for all microbatches: those that differ never get here (`jaxpr/split.py`).
        if collective.op in ("max", "min"):
            operands = tuple(map(without_gradient, operands))
        dtypes = [x.dtype for x in operands]
        if collective.op == "mean":  # float16 may not hold the sum
            operands = tuple(x.astype(jnp.float32) if x.dtype == jnp.float16 else x for x in operands)
        if axes is None or mesh_size == 1:
            operands = tuple(alone(*operands))
        elif collective.op in ("max", "min"):
            operands = tuple(_extreme(collective.op, x, axes) for x in operands)
        elif by_strategy and k == 1:
            operands = tuple(_total(operands, axes))
        else:  # one by one, as a step that is split may need some of them
            operands = tuple(jax.lax.psum(x, axes) for x in operands)
        if collective.op == "mean":
            means = [x / mesh_size for x in operands] if mesh_size > 1 else operands
            return [x.astype(dtype) for x, dtype in zip(means, dtypes, strict=True)]
        return [x * jnp.asarray(k, x.dtype) for x in operands] if collective.op == "sum" and k > 1 else operands

    return list(body(*leaves)) if trace is None else emit(collective, body, leaves)


def _extreme(op: str, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Takes the maximum or minimum over the replicas of a mesh; NaN where one of them is, as `jnp.maximum` has it."""
    reduce = jax.lax.pmax if op == "max" else jax.lax.pmin
    extreme = reduce(x, axes)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return extreme
    # XLA leaves open what its all-reduce makes of NaN; on CPU it passes over it (openxla.org/xla/operation_semantics).
    is_nan = jax.lax.pmax(jnp.isnan(x).astype(x.dtype), axes) > 0
    return jnp.where(is_nan, jnp.asarray(jnp.nan, x.dtype), extreme)


def _total(leaves: Sequence[jax.Array], axes: tuple[str, ...]) -> Sequence[jax.Array]:
    """Sums over the replicas of a mesh, by the strategy's own algorithm."""
    trace = context.current_trace()
    strategy = trace.strategy if trace else context.current_strategy()
    assert strategy is not None  # replica_axes() found its axes
    # An algorithm that is not exact serves gradients alone.
    reduction = strategy.reduction if strategy.reduction.exact else psum()
    carry = reduction.init(list(leaves))
    if jax.tree.leaves(carry):
        raise StrategyError(
            f"all-reduce {reduction.name} keeps something from call to call (`init` returned arrays), which only one for "
            "gradients can: make it `Reduction(name, init, apply, exact=False)`, or let `init` return ()."
        )
    return apply_reduction(reduction, list(leaves), carry, axes)[0]


def all_gather(tree: PyTree, axis: int = 0) -> PyTree:
    """Concatenates each leaf over the replicas, in the order of `replica_id()`; differentiable.

    Args:
        tree: pytree of arrays of the same shapes on every replica, each of rank 1 or more.
        axis: the axis to concatenate along; negative counts from the end.

    Returns:
        The tree with `axis` grown by the factor `num_replicas()`; the identity outside a mesh and in the global view.

    Raises:
        StepError: `axis` is not an int, or a leaf has no such axis or is not an array.
    """
    axis = as_axis("jdist.all_gather", axis)
    tree = as_arrays("jdist.all_gather", tree)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        rank = jnp.ndim(leaf)
        if not -rank <= axis < rank:
            raise StepError(
                f"jdist.all_gather: leaf {jax.tree_util.keystr(path) or 'value'} has shape {jnp.shape(leaf)} and no "
                f"axis {axis} to concatenate along. For one scalar a replica write `all_gather(x[None])`."
            )
    return jax.tree.map(lambda leaf: _gathered(leaf, axis % jnp.ndim(leaf)), tree)


def _gathered(leaf: jax.Array, axis: int) -> jax.Array:
    axes, trace = replica_axes(), context.current_trace()
    k = 1 if trace is None else trace.num_microbatches
    mesh_size = 1 if axes is None else axes_size(axes)

    def body(x: jax.Array) -> Sequence[jax.Array]:
        if mesh_size * k == 1:
            return alone(x)
        if k == 1:
            return [jax.lax.all_gather(x, axes, axis=axis, tiled=True)]
        # The same for all microbatches of a replica (`jaxpr/split.py`): its rows once for each of them.
        parts = x[None] if axes is None else jax.lax.all_gather(x, axes)
        rows = jnp.moveaxis(jnp.repeat(parts, k, axis=0), 0, axis)
        return [rows.reshape(*x.shape[:axis], mesh_size * k * x.shape[axis], *x.shape[axis + 1 :])]

    if trace is None:
        return leaf if axes is None else body(leaf)[0]
    return emit(Collective("value", "gather"), body, [leaf])[0]


def broadcast(tree: PyTree, source: int = 0) -> PyTree:
    """Gives every replica the version of one of them; differentiable.

    Args:
        tree: pytree of arrays of the same shapes on every replica; PRNG keys too.
        source: number of the replica with the version that counts, below `num_replicas()`.

    Returns:
        A tree like the source's, exact; `tree` itself with one replica, in the global view and outside a mesh.

    Raises:
        StepError: `source` is not the number of a replica, or a leaf is not an array.

    Example:
        >>> import jdist
        >>> jdist.mirrored(["cpu:0"]).run(lambda: jdist.broadcast(jdist.replica_id())).value.tolist()
        [0]
    """
    count = num_replicas()
    most = count - 1 if count > 1 else None  # outside a mesh, the number of a replica elsewhere
    number = checks.whole_number("source", source, StepError, least=0, most=most, call="jdist.broadcast")
    is_source = replica_id() == (number if count > 1 else 0)

    def of_source(xs: list[jax.Array]) -> list[jax.Array]:
        # As a sum, which takes the memory of one version where a gather takes that of all; never by the strategy's own
        # all-reduce, which may be one that compresses gradients.
        return combine(Collective("value", "sum"), [jnp.where(is_source, x, jnp.zeros_like(x)) for x in xs])

    return on_arrays(of_source, as_arrays("jdist.broadcast", tree))


def on_arrays(collective: Callable[[list[jax.Array]], list[jax.Array]], tree: PyTree) -> PyTree:
    """Applies a collective to all leaves at once; to keys and bools as the numbers that they are made of."""
    leaves, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))

    def number(x: jax.Array) -> jax.Array:
        return jax.random.key_data(x) if is_key(x) else x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x

    combined = collective([number(x) for x in leaves])
    return jax.tree.unflatten(
        treedef,
        [
            jax.random.wrap_key_data(x, impl=jax.random.key_impl(leaf)) if is_key(leaf) else x.astype(leaf.dtype)
            for x, leaf in zip(combined, leaves, strict=True)
        ],
    )


def mean(per_example: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Computes this replica's part of the mean over the global batch, padding left out.

    The mean over replicas of what this returns is the exact mean over all rows that count, wherever they are:
    `sum(mask * x) * N / psum(sum(mask))`. A mean of each replica's own mean is wrong as soon as one holds padding.

    Args:
        per_example: losses or metrics, shape [rows, ...].
        mask: bool, or float weights; shape [rows] or a longer prefix of `per_example`'s shape. None: all count.

    Returns:
        A scalar, float32 or wider. A batch in which nothing counts gives 0.

    Raises:
        StepError: the shape of `mask` is not a prefix of the shape of `per_example`, or one of them holds no numbers.

    Example:
        >>> import jdist, jax.numpy as jnp
        >>> float(jdist.mean(jnp.array([1.0, 3.0, 100.0]), jnp.array([True, True, False])))
        2.0
    """
    values = as_array("jdist.mean", "`per_example`", per_example)
    check_numbers("jdist.mean", "mean", values)
    values = values.astype(promote_types(values.dtype, jnp.float32))
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
    (count,) = combine(Collective("value", "sum"), [weights.sum(dtype=values.dtype)])
    return total * (num_replicas() / jnp.where(count == 0, 1, count))
