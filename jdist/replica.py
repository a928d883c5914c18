"""What a step may call: gradients, means and collectives over the replicas that run it.

Outside a strategy every function here is plain JAX or the identity, so one step serves everywhere. The mesh axes
come from JAX itself (the manual axes of the current mesh), cut down to those of the current strategy.

Under `transform="jit"` a step sees the whole batch at once (the *global view*). What a mean over replicas gives is
there already; a call that needs single replicas has no meaning and raises `GlobalViewError` when traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
GradientOp = Literal["mean", "sum"]
ReduceOp = Literal["mean", "sum", "max", "min"]


def replica_axes() -> tuple[str, ...] | None:
    """The mesh axes that replicas are spread over, for `BatchNorm(axis_name=...)` and collectives of your own.

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
    _refuse_in_global_view("num_replicas()", "use `strategy.num_replicas` if the number of devices is meant")
    axes = replica_axes()
    return 1 if axes is None else axes_size(axes)


def replica_id() -> jax.Array:
    """This replica's number, int32 scalar in [0, num_replicas); 0 outside a mesh.

    Raises:
        GlobalViewError: the step sees the whole batch.
    """
    _refuse_in_global_view("replica_id()", "the whole batch is one computation here, on no replica in particular")
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
    recorder = _gradient_recorder(trace)
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
    _check_op(op, get_args(ReduceOp))
    if op == "sum":
        _refuse_in_global_view(
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
            _note(trace, tree, op)
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
        _note(trace, reduced, op)
    return reduced


def _note(trace: context.ReplicaTrace, reduced: PyTree, op: str) -> None:
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
    _refuse_in_global_view("all_gather()", "the rows of the whole batch are here already")
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
    axes, recorder = replica_axes(), _gradient_recorder(context.current_trace())
    parts = 1 if axes is None else num_replicas()
    if recorder is not None:
        parts *= recorder.num_microbatches
        count = recorder.count(count)
    elif axes is not None:
        count = jax.lax.psum(count, axes)
    return total * (parts / jnp.where(count == 0, 1, count))


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    op: GradientOp = "mean",
) -> Callable[..., Any]:
    """As `jax.value_and_grad`, with value and gradient averaged over the replicas.

    This is the boundary at which strategies differ; nothing else in a step knows of them.

    Args:
        fun: a function of one replica's batch that returns a scalar loss, or `(loss, aux)`.
        argnums: as in JAX.
        has_aux: as in JAX; `aux` stays this replica's own.
        holomorphic: as in JAX.
        allow_int: as in JAX.
        op: "mean", or "sum" where the loss is already divided by the global batch.

    Returns:
        A function that returns `(value, grads)` or `((value, aux), grads)`, the same on every replica but for `aux`.

    Raises:
        StepError: the loss is not a scalar, or `op` is neither "mean" nor "sum".
        GlobalViewError: `op="sum"` in a step that sees the whole batch.

    Example:
        >>> import jdist
        >>> loss, grad = jdist.value_and_grad(lambda w: w**2)(3.0)
        >>> float(loss), float(grad)
        (9.0, 6.0)
    """
    _check_op(op, get_args(GradientOp))

    def checked(*args: Any, **kwargs: Any) -> Any:
        result = fun(*args, **kwargs)
        if isinstance(result, tuple) != has_aux or (has_aux and len(result) != 2):
            got = f"a tuple of {len(result)}" if isinstance(result, tuple) else "one value"
            raise StepError(
                f"jdist.value_and_grad: with has_aux={has_aux} the function must return "
                f"{'a pair (loss, aux)' if has_aux else 'the loss alone'}; it returned {got}."
            )
        loss = result[0] if has_aux else result
        if not isinstance(loss, float | int) and jnp.shape(loss) != ():
            raise StepError(
                f"jdist.value_and_grad: the loss has shape {jnp.shape(loss)}, it must be a scalar. If it holds one "
                'loss an example, return `jdist.mean(losses, batch["mask"])`.'
            )
        if not holomorphic and not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
            raise StepError(
                f"jdist.value_and_grad: the loss is {jnp.result_type(loss)}, which has no gradient; it must be floating point. "
                "A count of right answers is a metric: return it beside the loss (`has_aux=True`)."
            )
        return result

    local = jax.value_and_grad(checked, argnums=argnums, has_aux=has_aux, holomorphic=holomorphic, allow_int=allow_int)

    def value_and_grad_of_all(*args: Any, **kwargs: Any) -> Any:
        value, grads = local(*args, **kwargs)
        if has_aux:
            value, aux = value
            value, grads = combine_gradients(value, grads, op)
            return (value, aux), grads
        return combine_gradients(value, grads, op)

    return value_and_grad_of_all


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    op: GradientOp = "mean",
) -> Callable[..., Any]:
    """As `jax.grad`, with the gradient averaged over the replicas; see `value_and_grad` for the arguments.

    Returns:
        A function that returns `grads` or `(grads, aux)`.
    """
    both = value_and_grad(fun, argnums, has_aux, holomorphic, allow_int, op=op)

    def grad_of_all(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_of_all


def combine_gradients(value: jax.Array, grads: PyTree, op: GradientOp) -> tuple[jax.Array, PyTree]:
    """Reduces one replica's loss and gradient over the replicas, or cuts the step here if it is being split.

    Args:
        value: this replica's loss; scalar.
        grads: this replica's gradient; leaves without one (`float0`, integer parameters) pass through.
        op: "mean" or "sum".

    Returns:
        `(value, grads)`, the same on every replica.
    """
    if op == "sum":
        _refuse_in_global_view(
            'value_and_grad(op="sum")', "the loss of the whole batch has its whole gradient; leave `op` out"
        )
    leaves, treedef = jax.tree_util.tree_flatten_with_path(grads)
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    real = [i for i, (_, leaf) in enumerate(leaves) if leaf.dtype != jax.dtypes.float0]
    local = (value, [leaves[i][1] for i in real])
    trace = context.current_trace()
    recorder = _gradient_recorder(trace)
    if recorder is not None:
        value, combined = recorder.gradient(local, op)
    else:
        value, combined = reduce_gradients(*local, op)
    out = [leaf for _, leaf in leaves]
    for i, leaf in zip(real, combined, strict=True):
        out[i] = leaf
    if trace is not None and not trace.at_step_level():
        trace.hidden.append(op)
    elif trace is not None:
        own_part = _own_part if recorder is None and trace.looks_at_parts else lambda x: x
        trace.finite.append(("the loss", all_finite(value)))
        trace.finite.extend(
            (f"the gradient of {paths[i] or 'the parameters'}", all_finite(own_part(out[i])))
            for i in real
            if jnp.issubdtype(out[i].dtype, jnp.inexact)
        )
    return value, jax.tree_util.tree_unflatten(treedef, out)


def reduce_gradients(value: jax.Array, grads: PyTree, op: GradientOp) -> tuple[jax.Array, PyTree]:
    """Reduces one replica's loss and gradient by the strategy's own algorithm; the loss is always exact.

    Args:
        value: this replica's loss; scalar.
        grads: this replica's gradient.
        op: "mean" or "sum".

    Returns:
        `(value, grads)`, the same on every replica.

    Raises:
        StepError: the algorithm keeps something from step to step, which is not possible here.
    """
    axes, trace = replica_axes(), context.current_trace()
    strategy = trace.strategy if trace else context.current_strategy()
    if axes is None or strategy is None or not strategy.keeps_residuals:
        return all_reduce((value, grads), op)
    if trace is None or trace.residuals is None or not trace.at_step_level():
        raise StepError(
            f"all-reduce {strategy.reduction.name} keeps what it leaves out of a gradient for the next step, which it can do "
            "only for gradients taken in a distributed step itself, not inside a `lax.scan`, `lax.cond` or `jax.jit` of it, "
            'nor in `strategy.run`. Take them in the step, or use `all_reduce="psum"`.'
        )
    grads = trace.residuals.sum(grads, axes)
    if op == "mean":
        grads = jax.tree.map(lambda leaf: leaf / num_replicas(), grads)
    _note(trace, grads, op)
    return all_reduce(value, op), grads


def _own_part(x: jax.Array) -> jax.Array:
    """This replica's share of an array that all hold; the last shares overlap where it does not divide."""
    size = -(-x.size // num_replicas())
    return jax.lax.dynamic_slice_in_dim(x.reshape(-1), replica_id() * size, size)


def all_finite(x: jax.Array) -> jax.Array:
    """Whether no element of a floating-point array is NaN or infinite; bool scalar.

    Zero times a finite number is zero, and NaN otherwise: on CPU a sum takes half the time of `isfinite(x).all()`.
    """
    return ~jnp.isnan(jnp.sum(x * jnp.zeros((), x.dtype)))


def _check_op(op: str, allowed: tuple[str, ...]) -> None:
    if op not in allowed:
        raise StepError(f"`op` is {op!r}; allowed are {', '.join(map(repr, allowed))}.{did_you_mean(op, allowed)}")


def _refuse_in_global_view(call: str, instead: str) -> None:
    trace = context.current_trace()
    if trace is not None and trace.strategy.transform == "jit":
        raise GlobalViewError(
            f'jdist.{call} has no meaning under transform="jit", where a step sees the whole batch: {instead}. '
            'Or use transform="shard_map".'
        )


def _gradient_recorder(trace: context.ReplicaTrace | None) -> context.Recorder | None:
    recorder = None if trace is None else trace.recorder
    return recorder if recorder is not None and recorder.at == "gradient" else None
