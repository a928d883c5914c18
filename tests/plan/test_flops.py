"""Counting the operations of a step."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jdist.jaxpr.flops import count_flops, count_products

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


@pytest.mark.parametrize(
    ("function", "dtype", "kind"),
    [
        (lambda x: x @ x, jnp.float32, "float32"),
        (lambda x: x @ x, jnp.bfloat16, "16 bits"),
        (lambda x: lax.dot(x, x, preferred_element_type=jnp.float32), jnp.float16, "16 bits"),
        (lambda x: x @ x.astype(jnp.float32), jnp.bfloat16, "float32"),
        (lambda x: lax.dot(x, x, precision="high"), jnp.float32, "float32"),
        (lambda x: lax.dot(x, x, precision="highest"), jnp.float32, "float32 in full"),
        (lambda x: x @ x, jnp.int32, "wider"),
        (lambda x: lax.conv(x[None, None], x[None, None], (1, 1), "VALID"), jnp.bfloat16, "16 bits"),
    ],
)
def test_kinds_of_products(function, dtype, kind):
    counted = count_products(function, X.astype(dtype))
    assert set(counted) == {kind}
    assert counted[kind] == count_flops(function, X.astype(dtype)) > 0


def test_the_kind_follows_jaxs_default_precision():
    with jax.default_matmul_precision("float32"):
        assert set(count_products(lambda x: x @ x, X)) == {"float32 in full"}


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
