"""Update parts on arrays in parts: every operation gives what it gives on whole arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.core.layout import Layout
from jdist.jaxpr.elementwise import prepared
from jdist.sharded_state.update import ShardedArray, evaluate

STRATEGY = jdist.central_storage(jax.devices()[:4])
LAYOUT = Layout.of(STRATEGY)
RNG = np.random.default_rng(0)
# State on the host: a matrix in rows, one in a row of elements, a leaf that stays whole. Then gradients, on the devices.
SHAPES = {"rows": (63, 256), "flat": (7, 5), "small": (3,)}
SCALAR = np.float32(2)


def arrays():
    return {name: RNG.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def run(function, state, grads, scalar=SCALAR):
    """`function(state, grads, scalar)` by parts; and the text of what was traced."""
    closed = jax.make_jaxpr(function)(state, grads, scalar)
    shapes = jax.eval_shape(function, state, grads, scalar)

    def program(state, grads, scalar):
        def part(x, on_host):
            if not LAYOUT.takes_parts(x.shape, x.dtype):
                return x
            form = LAYOUT.form(x.shape)
            stored = jax.device_put(form.store(x), LAYOUT.device(form))
            return ShardedArray(jax.device_put(stored, LAYOUT.kept(form)) if on_host else stored, form, on_host=on_host)

        values = [part(x, True) for x in jax.tree.leaves(state)] + [part(x, False) for x in jax.tree.leaves(grads)]
        ready = prepared(closed, jax.tree.leaves((state, grads, scalar)))
        leaves = jax.tree.leaves(shapes)
        kept = [LAYOUT.form(s.shape) if LAYOUT.takes_parts(s.shape, s.dtype) else None for s in leaves]
        return evaluate(STRATEGY, LAYOUT, ready, [*values, scalar], kept)[0]

    state, grads, scalar = jax.device_put((state, grads, scalar), LAYOUT.whole)
    jaxpr = str(jax.make_jaxpr(program)(state, grads, scalar))
    results = jax.jit(program)(state, grads, scalar)
    leaves = [
        LAYOUT.form(s.shape).restore(np.asarray(x)) if LAYOUT.takes_parts(s.shape, s.dtype) else x
        for x, s in zip(results, jax.tree.leaves(shapes), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves), jaxpr


def each(function):
    return lambda state, grads, scalar: {name: function(state[name], grads[name], scalar) for name in state}


ELEMENTWISE = {
    "momentum": each(lambda m, g, s: 0.9 * m + s * g),
    "on the devices alone": each(lambda m, g, s: jnp.tanh(g) * s),
    "unchanged": each(lambda m, g, s: m),
    "constant": each(lambda m, g, s: jnp.zeros_like(m) + s),
    "chosen by a scalar": each(lambda m, g, s: jnp.where(s > 1, m - g, m)),
    "chosen by element": each(lambda m, g, s: jnp.where(g > 0, m, 0.0)),
    "clipped": each(lambda m, g, s: jnp.clip(m + g, -1.0, s)),
    "half precision": each(lambda m, g, s: (m.astype(jnp.bfloat16) * g.astype(jnp.bfloat16)).astype(jnp.float32)),
    "jit and custom_jvp": each(lambda m, g, s: jax.jit(lambda a, b: jax.nn.relu(a) + jnp.square(b))(m, g)),
    "checkpoint": each(lambda m, g, s: jax.checkpoint(jnp.sin)(m) * g),
    "cond": each(lambda m, g, s: jax.lax.cond(s > 1, lambda a, b: a - b, lambda a, b: a, m, g)),
    "switch": each(lambda m, g, s: jax.lax.switch(1, [lambda a: a, lambda a: a * 3, lambda a: -a], m)),
    "barrier": each(lambda m, g, s: jax.lax.optimization_barrier(m + g) * 2),
    "a row more": each(lambda m, g, s: m[None].reshape(m.shape) + g),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name):
    state, grads = arrays(), arrays()
    got, jaxpr = run(ELEMENTWISE[name], state, grads)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2 if "half" in name else 1e-6, atol=1e-6),
        got,
        ELEMENTWISE[name](state, grads, SCALAR),
    )
    assert "shard_map" not in jaxpr  # nothing had to be whole


def test_what_touches_the_state_is_computed_on_the_hosts_in_one_go():
    _, jaxpr = run(each(lambda m, g, s: (0.9 * m + s * g) * 2 - m), arrays(), arrays())
    assert jaxpr.count("compute_type=device_host") == 1


REDUCTIONS = {
    "norm of the gradients": lambda m, g, s: {
        k: m[k] - g[k] / jnp.sqrt(sum(jnp.sum(x * x) for x in g.values())) for k in m
    },
    "norm of the state": lambda m, g, s: {k: m[k] / jnp.linalg.norm(m[k]) for k in m},
    "norm of what the hosts computed": lambda m, g, s: {k: (u := m[k] + g[k]) / jnp.sum(jnp.abs(u)) for k in m},
    "extremes": each(lambda m, g, s: m * jnp.max(m - 5) + jnp.min(m + 5) + jnp.max(g)),
    "any": each(lambda m, g, s: jnp.where(jnp.any(m > 100) | jnp.all(g < 100), m, g)),
    # Powers of two, which no order of multiplication rounds; padding would be 0 and make it three times as large.
    "product": each(lambda m, g, s: m + jnp.prod(jnp.select([g > 3, g < -3, g == 0], [2.0, 0.5, 3.0], 1.0))),
    # `m > 100` is nowhere true and `m < 100` everywhere: padding with the other would change the result.
    "extremes of bools": each(lambda m, g, s: jnp.where(jnp.max(m > 100), m, g) + jnp.where(jnp.min(m < 100), 1, s)),
    "of unsigned integers": each(
        lambda m, g, s: m + jnp.max(jnp.abs(g).astype(jnp.uint8)) + jnp.min(g.astype(jnp.int8))
    ),
    "integers": each(lambda m, g, s: m + jnp.max(jnp.round(g).astype(jnp.int32) - 9) + jnp.sum(m > 0)),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name):
    """The padding, which is not zero after `m - 5` or `exp`, takes no part."""
    state, grads = arrays(), arrays()
    got, _ = run(REDUCTIONS[name], state, grads)
    want = REDUCTIONS[name](state, grads, SCALAR)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


WHOLE = {
    "matrix product": each(lambda m, g, s: m + (g @ (g.T @ m) if m.ndim == 2 else g)),
    "transposition": each(lambda m, g, s: (m.T * 2).T + g),
    "row means": each(lambda m, g, s: m / jnp.mean(jnp.abs(g), axis=-1, keepdims=True)),
    "row means of the state": each(lambda m, g, s: g - jnp.mean(m, axis=0)),
    "reshape to another stored shape": each(lambda m, g, s: (m.reshape(-1) * 2).reshape(m.shape) + g),
    "noise": each(lambda m, g, s: m + jax.random.normal(jax.random.key(3), m.shape)),
    "loop": each(lambda m, g, s: jax.lax.fori_loop(0, 3, lambda i, x: x * 0.5 + g, m)),
    "bit by bit": each(
        lambda m, g, s: (
            m
            + jnp.bitwise_or.reduce((4 * g).astype(jnp.int32), axis=None)
            + jnp.bitwise_and.reduce((4 * m).astype(jnp.int32) | 5, axis=None)
        )
    ),
    "place of the largest": each(lambda m, g, s: m.reshape(-1)[jnp.argmax(g)] + jnp.argmin(m) + g),
    "running sum": each(lambda m, g, s: jnp.cumsum(m, axis=0) + jnp.cumsum(g, axis=-1)),
    "sorted": each(lambda m, g, s: jnp.sort(m.reshape(-1)).reshape(m.shape)),
}


@pytest.mark.parametrize("function", [jnp.max, jnp.min])
def test_extremes_of_what_holds_nan_are_nan(function):
    state, grads = arrays(), arrays()
    state["rows"][1, 2] = grads["flat"][3, 1] = np.nan
    extremes = lambda state, grads, scalar: [function(x) for x in jax.tree.leaves((state, grads))]  # noqa: E731
    want = [getattr(np, function.__name__)(x) for x in jax.tree.leaves((state, grads))]  # XLA's own may pass over NaN
    np.testing.assert_array_equal(run(extremes, state, grads)[0], want)


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_not_elementwise_is_computed_whole(name):
    state, grads = arrays(), arrays()
    got, _ = run(WHOLE[name], state, grads)
    want = WHOLE[name](state, grads, SCALAR)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)
