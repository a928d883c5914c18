"""The floating-point operations of a function, counted from its jaxpr."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdist.jaxpr import graph
from jdist.support.chips import ProductKind

# What multiplies out of sight: kernels, grouped products, and calls of libraries.
_KERNELS = ("pallas_call", "ffi_call", "tpu_custom_call", "ragged_dot", "scaled_matmul", "dot_product_attention")


def count_flops(function: Any, *args: Any) -> int:
    """Counts the operations of one call, on all devices together, from its jaxpr."""
    # The compiler's own count takes a loop's body once. A multiply-add of a `dot_general` or
    # convolution counts two. The body of a `scan` counts as often as it runs, of a `while_loop`
    # once, of a conditional the branch with most.
    return count_products(function, *args).total()


def count_products(function: Any, *args: Any) -> Counter[ProductKind]:
    """Counts the operations of one call as `count_flops` does, by the kind of product."""
    return products_of(jax.make_jaxpr(function)(*args))


def products_of(closed: Any) -> Counter[ProductKind]:
    """Counts the operations of a jaxpr, closed, as `count_flops` does, by the kind of product."""
    return _products(graph.body_of(closed))


def is_countable(closed: Any) -> bool:
    """Returns whether the products of a jaxpr are all seen: none in a loop of unknown length, or in a kernel."""
    for eqn in graph.body_of(closed).eqns:
        name, inner = eqn.primitive.name, graph.nested_jaxprs(eqn)
        if name.startswith(_KERNELS):
            return False
        if name == "while" and any(_products(graph.body_of(each)) for each in inner):
            return False
        if not all(map(is_countable, inner)):
            return False
    return True


def _products(jaxpr: Any) -> Counter[ProductKind]:
    total: Counter[ProductKind] = Counter()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total[_kind(eqn)] += 2 * prod(eqn.outvars[0].aval.shape) * prod(left[i] for i in contracted)
        elif name == "conv_general_dilated":
            total[_kind(eqn)] += _convolution(eqn)
        else:
            inner = [_products(graph.body_of(closed)) for closed in graph.nested_jaxprs(eqn)]
            if name == "cond":
                inner = [max(inner, key=Counter.total)]
            for each in inner:
                total.update({kind: flops * eqn.params.get("length", 1) for kind, flops in each.items()})
    return total


def _kind(eqn: Any) -> ProductKind:
    dtypes = [jnp.dtype(v.aval.dtype) for v in eqn.invars[:2]]
    bytes_each = max(dtype.itemsize for dtype in dtypes)
    if bytes_each <= 2:
        return "16 bits"
    if bytes_each > 4 or not any(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return "wider"
    asked = eqn.params["precision"]  # a pair, a preset, or None
    is_full = (
        lax.Precision.HIGHEST in asked if isinstance(asked, tuple) else asked == lax.DotAlgorithmPreset.F32_F32_F32
    )
    return "float32 in full" if is_full else "float32"


def _convolution(eqn: Any) -> int:
    """Counts a convolution, without products with padding and with the zeros between dilated inputs."""
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
