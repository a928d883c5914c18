"""Gradients over the replicas: `value_and_grad`, the boundary at which strategies differ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jdist.core import context
from jdist.core.collective_marks import Collective, alone, emit, gradient_of, note_gradient
from jdist.core.precision import Precision
from jdist.errors import StepError
from jdist.replica.collectives import all_reduce, combine, num_replicas, replica_axes, replica_id
from jdist.support import checks
from jdist.support.arrays import promote_types
from jdist.support.tracebacks import without_own_frames
from jdist.typing import PyTree

# What flax (a collection) and Haliax (a base class) replace by its "gradient": maxima, and scales that follow from them.
OVERWRITTEN, OVERWRITTEN_CLASS = "_overwrite_with_gradient", "OverwriteWithGradient"
GradientOp = Literal["mean", "sum"]


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    op: GradientOp = "mean",
    using: Callable[..., Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Differentiates as `jax.value_and_grad`, and averages value and gradient over the replicas.

    This is the boundary at which strategies differ; nothing else in a step knows of them.

    Args:
        fun: a function of one replica's batch that returns a scalar loss, or `(loss, aux)`.
        argnums: as in JAX.
        has_aux: as in JAX; `aux` stays this replica's own.
        holomorphic: as in JAX.
        allow_int: as in JAX.
        op: "mean", or "sum" where the loss is already divided by the global batch.
        using: what takes the gradient in place of `jax.value_and_grad`: `using(fun, has_aux=has_aux)`, for example
            `equinox.filter_value_and_grad`. It differentiates by the first argument.

    Returns:
        A function that returns `(value, grads)` or `((value, aux), grads)`, the same on every replica but for `aux`.

    Raises:
        StepError: the loss is not a scalar, `op` is neither "mean" nor "sum", or `using` is given an option of JAX's; or
            `jax.vmap` maps it over examples: their gradients are local, so take `jax.value_and_grad`.

    Example:
        >>> import jdist
        >>> loss, grad = jdist.value_and_grad(lambda w: w**2)(3.0)
        >>> float(loss), float(grad)
        (9.0, 6.0)
    """
    checks.choice("op", op, get_args(GradientOp), StepError)
    if using is not None and (argnums != 0 or holomorphic or allow_int):
        raise StepError(
            "jdist.value_and_grad: `using` differentiates by the first argument, and takes no option but `has_aux`. Leave "
            "`argnums`, `holomorphic` and `allow_int` out; bind them to it before: `using=functools.partial(...)`."
        )

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
                "A count of right answers is a metric: return it with the loss (`has_aux=True`)."
            )
        return result

    def lowered(*args: Any, **kwargs: Any) -> Any:
        trace = context.current_trace()
        if trace is None or trace.precision is None:
            return checked(*args, **kwargs)
        which = _places(argnums, args)
        args = tuple(
            trace.precision.cast_to_compute(x, keep=(OVERWRITTEN,)) if i in which else x for i, x in enumerate(args)
        )
        return scale_loss(checked(*args, **kwargs), has_aux, trace.precision, trace.loss_scale)

    def differentiate(fun: Callable[..., Any]) -> Callable[..., Any]:
        if using is not None:
            return using(fun, has_aux=has_aux)
        return jax.value_and_grad(fun, argnums=argnums, has_aux=has_aux, holomorphic=holomorphic, allow_int=allow_int)

    @without_own_frames
    def value_and_grad_of_all(*args: Any, **kwargs: Any) -> Any:
        trace = context.current_trace()
        # Under a transformation of the user's (`jax.vmap`, `jax.jvp`, a gradient of this one) parts would not be the leaves'.
        is_plain = trace is not None and replica_axes() is not None and trace.at_step_level()
        in_parts = trace.in_parts if trace is not None and is_plain else None
        first = args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)
        by_rows = paths_by_rows(first)
        maxima = paths_of_maxima(first)
        fun, how = (lowered, op) if not maxima or op == "sum" else (share_of_mean(lowered, has_aux), "sum")
        if in_parts is not None:
            in_parts = in_parts.leaving(x for path, x in _paths(first) if path in by_rows or path in maxima)
        if in_parts is None:
            value, grads = differentiate(fun)(*args, **kwargs)
        else:
            value, grads = in_parts.take(differentiate, fun, args, kwargs, _places(argnums, args))
            if using is not None and not in_parts.fits(grads, first):
                in_parts = None
                value, grads = differentiate(fun)(*args, **kwargs)
        value, aux = value if has_aux else (value, None)
        if trace is not None:
            for parameter in jax.tree.leaves(first)[:1]:
                gradient_of(*map(jax.lax.stop_gradient, (jnp.asarray(value), jnp.asarray(parameter))))
        forms = {} if in_parts is None else in_parts.forms(first)
        value, grads = combine_gradients(value, grads, how, forms, by_rows, maxima)
        return ((value, aux) if has_aux else value), grads

    return value_and_grad_of_all


def paths_by_rows(tree: PyTree) -> list[str]:
    """Finds the arrays, of those by which a gradient is taken, that differ between the replicas; notes which they all are."""
    trace = context.current_trace()
    if trace is None or num_replicas() == 1:
        return []
    number, leaves = next(trace.gradients), _paths(tree)
    leaves = [(path, x) for path, x in leaves if isinstance(x, Tracer) and jnp.issubdtype(x.dtype, jnp.inexact)]
    note_gradient(number, [x for _, x in leaves])
    return [path for place, (path, _) in enumerate(leaves) if (number, place) in trace.by_rows]


def paths_of_maxima(tree: PyTree) -> list[str]:
    """Finds the leaves that travel as gradients and are maxima, by flax's collection or Haliax' class."""

    def is_overwritten(node: Any) -> bool:
        return any(base.__name__ == OVERWRITTEN_CLASS for base in type(node).__mro__)

    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_overwritten)
    paths = [(path + below, node) for path, node in nodes for below, _ in jax.tree_util.tree_leaves_with_path(node)]
    return [key for path, node in paths if OVERWRITTEN in (key := jax.tree_util.keystr(path)) or is_overwritten(node)]


def share_of_mean(fun: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Makes a loss the replica's share of the mean, so that what is kept of its gradients is of the size of one replica's."""

    def shared(*args: Any, **kwargs: Any) -> Any:
        result = fun(*args, **kwargs)
        return (result[0] / num_replicas(), result[1]) if has_aux else result / num_replicas()

    return shared


def _paths(tree: PyTree) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def _places(argnums: int | Sequence[int], args: tuple[Any, ...]) -> set[int]:
    """Finds the places of the arguments by which a function is differentiated."""
    return {i % len(args) for i in ((argnums,) if isinstance(argnums, int) else argnums)}


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    op: GradientOp = "mean",
    using: Callable[..., Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Differentiates as `jax.grad`, and averages the gradient over the replicas.

    Args:
        fun: a function of one replica's batch that returns a scalar loss, or `(loss, aux)`.
        argnums: as in JAX.
        has_aux: as in JAX; `aux` stays this replica's own.
        holomorphic: as in JAX.
        allow_int: as in JAX.
        op: "mean", or "sum" where the loss is already divided by the global batch.
        using: as in `value_and_grad`: a function that takes the value and the gradient in place of JAX's.

    Returns:
        A function that returns `grads` or `(grads, aux)`.
    """
    both = value_and_grad(fun, argnums, has_aux, holomorphic, allow_int, op=op, using=using)

    @without_own_frames
    def grad_of_all(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_of_all


def combine_gradients(
    value: jax.Array,
    grads: PyTree,
    op: GradientOp,
    # storage of the arrays that have parts as gradients, by path
    forms: Mapping[str, Any] = MappingProxyType({}),
    # gradients by values of this replica alone: each stays its own, its rows' part of the loss
    by_rows: Collection[str] = (),
    maxima: Collection[str] = (),  # not gradients: the largest value over the replicas
) -> tuple[jax.Array, PyTree]:
    """Reduces one replica's loss and gradient over the replicas, and removes the loss scale."""
    # Leaves without a gradient (`float0`, integer parameters) pass through.
    trace = context.current_trace()
    largest = combine(Collective("value", "max"), [x for path, x in _paths(grads) if path in maxima]) if maxima else []
    if trace is not None and trace.loss_scale is not None:
        value, grads = _unscaled((value, grads), trace.loss_scale)
    paths, out = zip(*_paths(grads), strict=True) if jax.tree.leaves(grads) else ((), ())
    out, share = list(out), num_replicas() if op == "mean" else 1
    is_own = [path in by_rows or path in maxima for path in paths]
    real = [i for i, leaf in enumerate(out) if leaf.dtype != jax.dtypes.float0 and not is_own[i]]
    if trace is not None and forms:
        of_parts = [forms.get(paths[i]) for i in real]
        value, combined = trace.in_parts.reduce(value, [out[i] for i in real], of_parts, op)
    else:
        value, combined = reduce_gradients(value, [out[i] for i in real], op)
    rest = iter(largest)
    out = [next(rest) if p in maxima else x / share if p in by_rows else x for p, x in zip(paths, out, strict=True)]
    for i, leaf in zip(real, combined, strict=True):
        out[i] = leaf
    if trace is not None and not trace.at_step_level():
        trace.hidden.append(op)
    elif trace is not None:
        places = [i for i in real if jnp.issubdtype(out[i].dtype, jnp.inexact)]
        names = ["the loss", *(f"the gradient of {paths[i] or 'the parameters'}" for i in places)]
        flags = _flags([value, *(out[i] for i in places)], in_parts=trace.looks_at_parts)
        trace.finite.extend(zip(names, flags, strict=True))
    return value, jax.tree.unflatten(jax.tree.structure(grads), out)


def reduce_gradients(value: jax.Array, grads: list[jax.Array], op: GradientOp) -> tuple[jax.Array, list[jax.Array]]:
    """Reduces a replica's loss and gradient by the strategy's own algorithm; the loss is exact."""
    axes, trace = replica_axes(), context.current_trace()
    strategy = trace.strategy if trace else context.current_strategy()
    mean_or_sum = Collective("gradient", op)
    microbatches = 1 if trace is None else trace.num_microbatches  # their gradients are reduced once all are added up
    if axes is None or strategy is None or not strategy.keeps_residuals or microbatches > 1 or not grads:
        value, *grads = combine(mean_or_sum, [value, *grads], by_strategy=True)
        return value, grads
    if trace is None or trace.sum_gradient is None or not trace.at_step_level():
        raise StepError(
            f"all-reduce {strategy.reduction.name} keeps what it leaves out, and can do so only for gradients taken in a "
            "distributed step itself, not inside a `lax.scan`, `lax.cond` or `jax.jit` of it, nor in `strategy.run`. Take "
            'them in the step, or use `all_reduce="psum"`.'
        )
    grads = trace.sum_gradient(grads, axes)
    if op == "mean":
        grads = [leaf / num_replicas() for leaf in grads]
    return combine(Collective("value", op), [value])[0], emit(mean_or_sum, alone, grads)


def scale_loss(result: Any, has_aux: bool, precision: Precision, loss_scale: jax.Array | None) -> Any:
    """Casts what a loss function returned in 16 bits to float32, and multiplies the loss by the loss scale."""
    loss, aux = result if has_aux else (result, None)
    loss = jnp.asarray(loss)
    loss = loss.astype(promote_types(loss.dtype, jnp.float32))
    loss = loss if loss_scale is None else loss * loss_scale
    return (loss, precision.cast_to_output(aux)) if has_aux else loss


def _unscaled(tree: PyTree, scale: jax.Array) -> PyTree:
    """Divides a loss and its gradient by the loss scale; leaves without a gradient stay."""

    def divided(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        wide = promote_types(x.dtype, jnp.float32)
        return (x.astype(wide) / scale.astype(jnp.finfo(wide).dtype)).astype(x.dtype)

    return jax.tree.map(divided, tree)


def _flags(grads: Sequence[jax.Array], *, in_parts: bool) -> list[jax.Array]:
    """Looks whether gradients are finite, one bool scalar each; in parts, each replica at its share of those that all hold."""
    count, number = num_replicas(), replica_id().astype(jnp.uint32) if in_parts else 0

    def share(x: jax.Array) -> jax.Array:
        size = -(-x.size // count)  # the last shares overlap where it does not divide
        return jax.lax.dynamic_slice(x.reshape(-1), (number * np.uint32(size),), (size,))

    return [all_finite(share(x) if in_parts and x.size > _SMALL else x) for x in grads]


_SMALL = 2048  # elements that every replica looks at, as the cut would cost more


def all_finite(x: jax.Array) -> jax.Array:
    """Returns whether no element of a floating-point array is NaN or infinite, nor their sum in float32; bool scalar."""
    # A sum is not finite where an element is not. On CPU it takes half the time of `isfinite(x).all()`, and XLA need not
    # write out the elements as it does for products with zero.
    wide = x if x.dtype.itemsize >= 4 else jax.lax.convert_element_type(x, jnp.float32)
    return jnp.isfinite(jax.lax.reduce_sum(wide, range(x.ndim)))


def global_loss(fun: Callable[[PyTree], jax.Array]) -> Callable[[PyTree], jax.Array]:
    """Makes the loss of the whole batch of the loss of one replica's rows; value and gradient are means over the replicas.

    A line search (`optax.lbfgs`, `optax.scale_by_backtracking_linesearch`) compares losses at several points, and takes
    gradients there: `tx.update(..., value_fn=jdist.global_loss(loss_fn))`. All replicas then choose the same point.

    Args:
        fun: `parameters -> loss`, a scalar; of a replica's own rows.

    Returns:
        A function of the same form, to be called and differentiated in a step.

    Example:
        >>> import jax, jdist
        >>> loss, grad = jax.value_and_grad(jdist.global_loss(lambda w: w**2))(3.0)
        >>> float(loss), float(grad)
        (9.0, 6.0)
    """
    both = value_and_grad(fun)

    @jax.custom_vjp
    def whole(params: PyTree) -> jax.Array:
        return all_reduce(fun(params), "mean")

    def backward(grads: PyTree, cotangent: jax.Array) -> tuple[PyTree]:
        return (jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), grads),)

    whole.defvjp(both, backward)
    return whole
