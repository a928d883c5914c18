"""Counting the operations of a step."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jdist.plan.step import count_flops

X = jnp.ones((8, 8))
PRODUCT = 2 * 8**3


@pytest.mark.parametrize(
    ("function", "products"),
    [
        (lambda x: x @ x, 1),
        (lambda x: jnp.sin(x) + x, 0),
        (lambda x: lax.scan(lambda c, _: (c @ c, None), x, None, length=10)[0], 10),
        (lambda x: jax.jit(lambda y: y @ y @ y)(x), 2),
        (lambda x: lax.cond(x[0, 0] > 0, lambda y: y @ y @ y, lambda y: y, x), 2),
        (jax.vmap(lambda row: X @ row), 1),
        (jax.grad(lambda x: jnp.sum((x @ X) ** 2)), 2),
        (jax.checkpoint(lambda x: x @ x), 1),
    ],
)
def test_products(function, products):
    assert count_flops(function, X) == products * PRODUCT


CONVOLUTIONS = [
    {"window_strides": (1, 1), "padding": "SAME"},
    {"window_strides": (2, 1), "padding": ((1, 2), (0, 1)), "lhs_dilation": (1, 2), "rhs_dilation": (2, 1)},
    {"window_strides": (1, 1), "padding": "VALID", "feature_group_count": 2},
]


@pytest.mark.parametrize("options", CONVOLUTIONS)
def test_convolutions_as_the_compiler_counts_them(options):
    groups = options.get("feature_group_count", 1)
    x, kernel = jnp.ones((3, 4, 9, 7)), jnp.ones((6, 4 // groups, 3, 2))

    def convolve(x, kernel):
        return lax.conv_general_dilated(x, kernel, **options)

    counted = jax.jit(convolve).lower(x, kernel).cost_analysis()["flops"]
    assert count_flops(convolve, x, kernel) == counted > 0
