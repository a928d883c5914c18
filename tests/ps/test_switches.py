"""A job on parameter servers computes the same under JAX's own switches, which its servers do not know of."""

import contextlib
import itertools

import jax
import numpy as np
import pytest

import jdist
from tests.by_default import some
from tests.conformance.test_switches import SWITCHES, train

pytestmark = pytest.mark.xdist_group(__name__)  # they share their servers

LAYOUTS = {
    "async": {"local_workers": 1, "local_ps": 1},
    "sync": {"local_workers": 2, "local_ps": 1, "mode": "sync"},
}
CHANGE_WHAT_IS_TRACED = ("mesh_explicit", "mesh_of_another_size", "x64", "disable_jit", "transfer_guard")
EVERY = list(itertools.product(LAYOUTS, SWITCHES))


@pytest.fixture(scope="module")
def strategies():
    with contextlib.ExitStack() as ends:
        made = {name: jdist.parameter_server(**layout) for name, layout in LAYOUTS.items()}
        for strategy in made.values():
            ends.callback(strategy.coordinator.close)
        yield made


@pytest.fixture(scope="module")
def expected():
    return train(jdist.default())


@pytest.mark.parametrize(("mode", "switch"), some(EVERY, [each for each in EVERY if each[1] in CHANGE_WHAT_IS_TRACED]))
def test_numbers_are_those_without_the_switch(strategies, mode, switch, expected):
    with SWITCHES[switch]():
        found = train(strategies[mode])
    # As for all conformance under SGD: replicas sum in another order.
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("switch", ["mesh_explicit", "mesh_of_another_size", "disable_jit", "transfer_guard"])
def test_a_function_for_the_workers_is_traced_as_plain_jax_does(strategies, switch):
    def doubled(x):
        return 2.0 * x.sum()

    coordinator = strategies["async"].coordinator
    with SWITCHES[switch]():
        assert coordinator.fetch(coordinator.schedule(doubled, args=(np.arange(3, dtype=np.float32),))) == 6.0


def test_integers_and_floats_of_64_bits_keep_them(strategies):
    def step(state, batch):
        grad = jdist.grad(lambda w: jdist.mean((w * batch["x"] - 1.0) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * grad, "n": state["n"] + 1}, {"w": state["w"]}

    with SWITCHES["x64"]():
        for strategy in strategies.values():
            run = jdist.distribute(step, strategy)
            state = strategy.init(lambda: {"w": np.float64(0.1), "n": np.int64(2**40)})
            for _ in range(2):
                state, _ = run(state, {"x": np.linspace(0, 1, 16)})
            state = strategy.fetch(state)
            assert (int(state["n"]), state["w"].dtype) == (2**40 + 2, np.float64)
            w = 0.1
            for _ in range(2):
                w -= 0.1 * np.mean(2 * (w * np.linspace(0, 1, 16) - 1) * np.linspace(0, 1, 16))
            np.testing.assert_allclose(state["w"], w, rtol=1e-12)
