"""Arrays in parts: what they show, and how they are stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.core.layout import Layout
from jdist.core.sharded_leaf import ShardedLeaf, map_leaves, spread_like
from jdist.errors import StepError


@pytest.fixture(scope="module")
def strategy():
    return jdist.central_storage(jax.devices()[:4])


@pytest.fixture(scope="module")
def layout(strategy):
    return Layout.of(strategy)


@pytest.mark.parametrize(
    ("shape", "stored"),
    [
        ((4,), (4,)),
        ((13,), (16,)),
        ((6, 8), (48,)),  # narrow: one row of elements
        ((5, 7), (36,)),
        ((64, 128), (64, 128)),
        ((63, 128), (64, 128)),  # a row more
        ((5, 128), (640,)),  # three rows more would be more than half of it again
        ((3, 3, 64, 128), (576, 128)),
        ((96, 12, 64), (96, 768)),  # its last axis alone is narrow
        ((2, 1000), (2000,)),
    ],
)
def test_stored_shapes(layout, shape, stored):
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    assert layout.form(shape).stored == stored
    assert layout.form(shape).store(x).shape == stored
    assert stored[0] % 4 == 0
    np.testing.assert_array_equal(layout.form(shape).restore(layout.form(shape).store(x)), x)


def test_what_has_fewer_elements_than_parts_and_keys_stay_whole(layout):
    assert layout.takes_parts((2, 2), jnp.float32)
    assert not layout.takes_parts((3,), jnp.float32)
    assert not layout.takes_parts((), jnp.int32)
    assert not layout.takes_parts((8,), jax.random.key(0).dtype)


def test_padding_is_kept_out_of_sums(layout):
    stored = jnp.ones((16,))
    assert float(layout.form((13,)).with_padding(stored, 0).sum()) == 13
    assert float(layout.form((63, 128)).with_padding(jnp.ones((64, 128)), 0).sum()) == 63 * 128
    assert layout.form((16,)).with_padding(stored, 0) is stored


def test_it_shows_what_it_is_and_gives_its_values(strategy):
    state = strategy.init(lambda: {"w": jnp.arange(15.0).reshape(3, 5), "step": jnp.int32(7)})
    w = state["w"]
    assert isinstance(w, ShardedLeaf)
    assert (w.shape, w.ndim, w.size, w.dtype) == ((3, 5), 2, 15, jnp.float32)
    kept = "in 4 parts over replica in host memory: [4] each, stored as [16]"
    assert repr(w) == f"ShardedLeaf(float32[3, 5] {kept}; strategy.fetch gives the array)"
    np.testing.assert_array_equal(np.asarray(w), np.arange(15.0).reshape(3, 5))
    np.testing.assert_array_equal(np.asarray(w, np.int32), np.arange(15).reshape(3, 5))
    np.testing.assert_array_equal(w[1], np.arange(5.0, 10.0))
    assert len(w) == 3
    assert [row.tolist() for row in w] == np.arange(15.0).reshape(3, 5).tolist()
    with pytest.raises(ValueError, match="copy=False"):
        w.__array__(copy=False)
    with pytest.raises(StepError, match=r"float32 array of shape \(3, 5\) in parts only the shape is known"):
        np.asarray(jax.eval_shape(lambda w: w, w))
    assert int(state["step"]) == 7
    assert w.nbytes == 60
    assert "ShardedLeaf" in repr(jax.tree.map(lambda x: None, w))


def jitted(f):
    return lambda w: jax.jit(f)(w)


@pytest.mark.parametrize(
    "use",
    [
        jnp.sin,
        jnp.sum,
        lambda w: jnp.ones(3) @ w,
        lambda w: w.T,
        lambda w: w.mean(),
        lambda w: w + 1,
        lambda w: 2 * w,
        lambda w: w / w,
        lambda w: w @ np.ones(5),
        lambda w: -w,
        lambda w: abs(w),
        lambda w: w > 0,
        jitted(lambda w: jnp.ones(3) @ w),
        jitted(jnp.sum),
        jitted(lambda w: np.asarray(w)),
        jitted(lambda w: w[0]),
    ],
)
def test_computing_with_it_says_what_to_do(strategy, use):
    w = strategy.init(lambda: jnp.ones((3, 5)))
    with pytest.raises((StepError, AttributeError), match=r"in parts.*strategy\.fetch\(state\)"):
        use(w)


def test_what_a_map_made_of_it_is_shown_as_it_is(strategy):
    state = strategy.init(lambda: {"w": jnp.ones((3, 5))})
    assert repr(jax.tree.map(jnp.linalg.norm, state)["w"]).startswith("ShardedLeaf(Array(3.8")
    moved = jax.device_put(state, jax.devices()[0])["w"]
    assert "whole on cpu:0, stored as [16]" in repr(moved)
    moved.stored.delete()
    w = strategy.init(lambda: jnp.ones((3, 5)))
    w.stored.delete()
    assert "deleted (donated to a step)" in repr(w)


def test_spread_as_another(strategy):
    w = strategy.init(lambda: jnp.zeros((3, 5)))
    other = spread_like(np.arange(15, dtype=np.float32).reshape(3, 5), w)
    assert other.stored.sharding == w.stored.sharding
    np.testing.assert_array_equal(np.asarray(other), np.arange(15.0).reshape(3, 5))


def test_one_leaf_each(strategy):
    state = strategy.init(lambda: {"w": jnp.zeros((3, 5)), "n": jnp.int32(0)})
    assert map_leaves(lambda x: x.shape, state) == {"w": (3, 5), "n": ()}


def test_a_teacher_that_a_step_closes_over_is_told_to_be_an_argument():
    strategy = jdist.sharded(jax.devices()[:2], whole_below=1)
    teacher = strategy.init(lambda: {"w": jnp.ones((4, 2))})

    def distil(w, batch, teacher=None):
        target = batch["x"] @ (frozen if teacher is None else teacher)["w"]
        return w, {"mean": jdist.mean(target)}

    frozen, batch = teacher, {"x": np.ones((2, 4), np.float32)}
    with pytest.raises(StepError, match=r'a step closes over it.*role "replicated", or as a second state'):
        jdist.distribute(distil, strategy)(jnp.zeros(3), batch)
    _, metrics = jdist.distribute(distil, strategy, args=("state", "batch", "replicated"))(jnp.zeros(3), batch, teacher)
    assert float(metrics["mean"]) == 4
