"""Arguments with an entry a replica, as `pmap` takes them, and results given back in the same form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.errors import StepError

ROLES = {"args": ("state", "per_replica", "per_replica"), "returns": ("state", "per_replica")}


def draw(state, batch, key):
    noise = jax.random.normal(key, ())
    return state + batch["x"].sum() * 0, {"rows": batch["x"].sum(), "noise": noise}


@pytest.fixture(params=["shard_map", "pmap"])
def strategy(request):
    return jdist.mirrored(transform=request.param)


def test_each_replica_gets_its_entry(strategy):
    x, keys = np.arange(32.0, dtype=np.float32).reshape(8, 4), jax.random.split(jax.random.key(0), 8)
    state, results = jdist.distribute(draw, strategy, **ROLES)(jnp.zeros(()), {"x": x}, keys)
    np.testing.assert_allclose(results["rows"], x.sum(1))
    np.testing.assert_allclose(results["noise"], jax.vmap(lambda key: jax.random.normal(key, ()))(keys), rtol=1e-6)
    assert state.shape == ()


def test_one_device_has_one_entry():
    step = jdist.distribute(draw, jdist.one_device(), **ROLES)
    _, results = step(jnp.zeros(()), {"x": np.ones((1, 4), np.float32)}, jax.random.split(jax.random.key(0), 1))
    assert results["rows"].tolist() == [4]


def test_several_steps_in_a_call(strategy):
    step = jdist.distribute(
        lambda state, batch: (state + jax.lax.psum(batch.sum(), strategy.axes), batch.sum()),
        strategy,
        args=("state", "per_replica"),
        returns=("state", "per_replica"),
        steps_per_call=3,
    )
    x = np.arange(48.0, dtype=np.float32).reshape(3, 8, 2)
    state, sums = step(jnp.zeros(()), x)
    assert float(state) == x.sum()
    np.testing.assert_allclose(np.asarray(sums), x.sum(-1).T)


def test_another_number_of_entries_is_refused(strategy):
    with pytest.raises(StepError, match=r"\"per_replica\" has 2 entries for a replica at \['x'\]"):
        jdist.distribute(draw, strategy, **ROLES)(
            jnp.zeros(()), {"x": np.ones((16, 4), np.float32)}, jax.random.split(jax.random.key(0), 16)
        )


def test_the_global_view_has_no_replicas():
    with pytest.raises(StepError, match=r"has no meaning under transform=\"jit\""):
        jdist.distribute(
            lambda state, x: (state, {"x": x.sum()}), jdist.mirrored(transform="jit"), args=ROLES["args"][:2]
        )(jnp.zeros(()), np.ones((8, 4), np.float32))


def test_no_microbatches():
    with pytest.raises(StepError, match="cannot be cut into microbatches"):
        jdist.distribute(draw, jdist.mirrored(), accumulate=2, **ROLES)


def test_a_state_replicated_by_hand_is_refused_with_what_to_write():
    jax_utils = pytest.importorskip("flax.jax_utils")
    state = jax_utils.replicate({"w": jnp.ones(3)})
    with pytest.raises(StepError, match=r"delete the line with `jax_utils\.replicate`.*`strategy\.fetch\(state\)`"):
        jdist.distribute(lambda state, batch: (state, {}), jdist.mirrored())(state, {"x": np.ones(8)})
