"""All-reduce algorithms."""

import jax
import numpy as np
import pytest

import jdist
from jdist.errors import StrategyError
from jdist.reduction import Reduction, make_reduction, psum


def test_by_name_or_given():
    assert make_reduction("psum").name == "psum"
    mine = psum()._replace(name="mine")
    assert make_reduction(mine) is mine


@pytest.mark.parametrize("value", ["ring", None, 3, ["psum"], psum])
def test_what_is_no_algorithm_is_refused_with_what_is(value):
    with pytest.raises(
        StrategyError, match=r"`all_reduce` is .*; allowed are the names 'psum' and a `jdist\.reduction"
    ):
        make_reduction(value)


def test_psum_sums_a_tree_in_one_all_reduce():
    strategy = jdist.mirrored(["cpu:0", "cpu:1"])

    def step(x):
        summed, carry = psum().apply({"a": x, "b": [x[0], 2 * x]}, psum().init(None), ("replica",))
        assert carry == ()
        return summed["a"].sum(), summed["b"][0], summed["b"][1].sum()

    run = jdist.distribute(step, strategy, args=("batch",), returns="per_replica")
    a, b, c = run(np.array([1, 2, 3, 4], np.float32)).value
    assert (a.tolist(), b.tolist(), c.tolist()) == ([10, 10], [4, 4], [20, 20])


def test_gradients_means_and_metrics_go_through_the_strategys_own():
    trees = []

    def apply(tree, carry, axes):
        trees.append(jax.tree.structure(tree))
        return jax.lax.psum(tree, axes), carry

    mine = Reduction("counting", lambda tree: (), apply)
    strategy = jdist.mirrored(["cpu:0", "cpu:1"], all_reduce=mine)
    assert "all-reduce counting" in repr(strategy)

    def step(w, batch):
        loss, grads = jdist.value_and_grad(lambda w: (w["a"] * batch["x"]).mean() + w["b"])(w)
        return jax.tree.map(lambda p, g: p - g, w, grads), {"loss": loss, "x": batch["x"].mean()}

    run = jdist.distribute(step, strategy)
    state, metrics = run({"a": 1.0, "b": 1.0}, {"x": np.array([1, 2, 3, 4], np.float32)})
    assert (float(state["a"]), float(state["b"])) == (-1.5, 0.0)
    assert (float(metrics["loss"]), float(metrics["x"])) == (3.5, 2.5)
    assert len(trees) == 2  # loss and gradients together; the metrics that are no averages yet together
