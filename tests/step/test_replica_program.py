"""What one replica computes in one call: the user's step, accumulated, guarded and repeated as the options say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.errors import NonFiniteError
from tests.toys import TRANSFORMS, TWO

EVERY = {"default": jdist.default(), **TRANSFORMS}
rng = np.random.default_rng(0)
BATCHES = {
    "x": rng.normal(size=(3, 8, 2)).astype(np.float32),
    "y": rng.normal(size=(3, 8)).astype(np.float32),
    "mask": np.arange(24).reshape(3, 8) % 8 < 5,
}


def train(state, batch):
    f = lambda w: jdist.mean((batch["x"] @ w - batch["y"]) ** 2, batch["mask"])  # noqa: E731
    loss, grad = jdist.value_and_grad(f)(state["w"])
    return {"w": state["w"] - 0.1 * grad, "n": state["n"] + 1}, {"loss": loss, "n": state["n"]}


def create():
    return {"w": jnp.ones(2), "n": jnp.int32(0)}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_several_steps_in_a_call_equal_as_many_calls(name, accumulate):
    expected, losses = create(), []
    for i in range(3):
        expected, metrics = jax.jit(train)(expected, jax.tree.map(lambda x, i=i: x[i], BATCHES))
        losses.append(metrics["loss"])
    run = jdist.distribute(train, EVERY[name], accumulate=accumulate, steps_per_call=3)
    state, metrics = run(create(), BATCHES)
    np.testing.assert_allclose(state["w"], expected["w"], rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-5)
    assert metrics["n"].tolist() == [0, 1, 2]
    assert int(state["n"]) == 3


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_bad_step_among_several_in_a_call(accumulate):
    bad = {**BATCHES, "y": BATCHES["y"].copy()}
    bad["y"][1, 0] = np.nan
    run = jdist.distribute(train, TWO, accumulate=accumulate, steps_per_call=3)
    run(create(), bad)
    with pytest.raises(NonFiniteError) as caught:
        run.wait()
    assert caught.value.step == 1
    assert int(run.last_state["n"]) == 1


def test_the_state_of_a_step_that_returns_none_is_left_alone():
    run = jdist.distribute(lambda s, b: s["w"].sum() + b["y"].mean(), TWO, returns="metrics")
    state = TWO.init(create)
    batch = {"y": BATCHES["y"][0], "z": np.ones(8)}
    np.testing.assert_allclose([run(state, batch) for _ in range(2)], 2 + BATCHES["y"][0].mean(), rtol=1e-6)
    assert run.last_state is None
