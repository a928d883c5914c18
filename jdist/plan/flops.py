"""Floating-point operations of a step's matrix products and convolutions, counted from its jaxpr.

The compiler's own count takes the body of a loop once, however often the loop runs.
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax

from jdist import dataflow


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
            inner = [_flops(sub) for sub in dataflow.nested(eqn)]
            if inner:
                total += max(inner) if name == "cond" else sum(inner) * eqn.params.get("length", 1)
    return total


def _convolution(eqn: Any) -> int:
    """As the textbook counts it: products with padding are counted as if the padding were data."""
    numbers, kernel = eqn.params["dimension_numbers"], eqn.invars[1].aval.shape
    out_channels, in_channels, *spatial = (kernel[i] for i in numbers.rhs_spec)
    del out_channels  # is a dimension of the result
    dilation = prod(eqn.params["lhs_dilation"])  # zeros put between the inputs take no work
    return 2 * prod(eqn.outvars[0].aval.shape) * in_channels * prod(spatial) // dilation
