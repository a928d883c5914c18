"""Floating-point operations of a step's matrix products and convolutions, counted from its jaxpr.

The compiler's own count takes the body of a loop once, however often the loop runs.
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import numpy as np

from jdist.jaxpr import graph


def count_flops(function: Any, *args: Any) -> int:
    """Counts the operations of one call, those of all devices together; nothing is run.

    Args:
        function: a pure function.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct`s.

    Returns:
        Two for each multiply-add of a `dot_general` or convolution. The body of a `scan` counts as often as it runs,
        of a `while_loop` once, of a conditional the branch with most.

    Example:
        >>> import jax.numpy as jnp
        >>> count_flops(lambda x: x @ x, jnp.ones((8, 8)))
        1024
    """
    return _flops(jax.make_jaxpr(function)(*args).jaxpr)


def _flops(jaxpr: Any) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total += 2 * prod(eqn.outvars[0].aval.shape) * prod(left[i] for i in contracted)
        elif name == "conv_general_dilated":
            total += _convolution(eqn)
        else:
            inner = [_flops(closed.jaxpr) for closed in graph.nested_jaxprs(eqn)]
            if inner:
                total += max(inner) if name == "cond" else sum(inner) * eqn.params.get("length", 1)
    return total


def _convolution(eqn: Any) -> int:
    """Products with padding and with the zeros between dilated inputs take no work and are left out."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    image, kernel, result = (v.aval.shape for v in (*eqn.invars[:2], eqn.outvars[0]))
    pairs = 1
    for d in range(len(result) - 2):
        low, _ = params["padding"][d]
        spread, apart = params["lhs_dilation"][d], params["rhs_dilation"][d]
        outputs = np.arange(result[numbers.out_spec[d + 2]]) * params["window_strides"][d]
        at = outputs[:, None] + np.arange(kernel[numbers.rhs_spec[d + 2]]) * apart - low
        inside = (at >= 0) & (at <= (image[numbers.lhs_spec[d + 2]] - 1) * spread) & (at % spread == 0)
        pairs *= int(inside.sum())
    rows, features = (result[numbers.out_spec[i]] for i in (0, 1))
    return 2 * rows * features * kernel[numbers.rhs_spec[1]] * pairs
