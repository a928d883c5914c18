"""The loss of all replicas' rows as a function of the parameters, for optimisers that evaluate it themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jdist.gradients import value_and_grad
from jdist.replica import all_reduce

PyTree = Any


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
