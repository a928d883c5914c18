"""All-reduce algorithms by name, and in a strategy."""

import re

import jax
import numpy as np
import pytest

import jdist
from jdist.errors import StrategyError
from jdist.reduction import Reduction, make_reduction, psum
from jdist.reduction.by_name import REDUCTIONS


def test_by_name_or_given():
    assert make_reduction("psum").name == "psum"
    mine = psum()._replace(name="mine")
    assert make_reduction(mine) is mine


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("ring", "ring"),
        ("to_one_device", "to_one_device"),
        ({"name": "psum"}, "psum"),
        ({"name": "bucketed", "bytes_per_pack": 50}, "bucketed(50)"),
        ({"name": "hierarchical", "inner": 4, "outer": 2}, "hierarchical(4, 2)"),
        ({"name": "compressed", "dtype": "int8"}, "compressed(int8)"),
    ],
)
def test_names_and_options_as_a_config_has_them(value, name):
    assert make_reduction(value).name == name
    assert f"all-reduce {name}" in repr(jdist.make_strategy("mirrored", all_reduce=value))


@pytest.mark.parametrize("value", ["psun", None, 3, ["psum"], psum, {}, {"bytes_per_pack": 5}, {"name": ["ring"]}])
def test_what_is_no_algorithm_is_refused_with_what_is(value):
    with pytest.raises(StrategyError, match=r"`all_reduce` is .* Allowed are the names 'psum', 'bucketed'.*Reduction"):
        make_reduction(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("rings", "Did you mean 'ring'?"),
        ("hierarchical", "needs `inner` and `outer`: write `jdist.reduction.hierarchical(inner=..., outer=...)`"),
        ({"name": "bucketed", "bytes_per_packs": 5}, "no option 'bytes_per_packs'. Did you mean 'bytes_per_pack'?"),
        ({"name": "ring", "size": 5}, "no option 'size'. It has none."),
        ({"name": "compressed", "dtype": "int4"}, "`dtype` is 'int4'; it must be 'bf16' or 'int8'"),
        ({"name": "bucketed", "bytes_per_pack": -1}, "`bytes_per_pack` is -1"),
    ],
)
def test_a_wrong_name_or_option_is_refused_with_the_remedy(value, text):
    with pytest.raises(StrategyError, match=re.escape(text)):
        make_reduction(value)


def test_an_option_with_a_default_may_be_left_out(monkeypatch):
    def parts(count, size=2):
        return psum()._replace(name=f"parts({count}, {size})")

    monkeypatch.setitem(REDUCTIONS, "parts", parts)
    assert make_reduction({"name": "parts", "count": 1}).name == "parts(1, 2)"
    assert make_reduction({"name": "parts", "count": 1, "size": 3}).name == "parts(1, 3)"
    with pytest.raises(StrategyError, match=re.escape("needs `count`: write `jdist.reduction.parts(count=...)`")):
        make_reduction("parts")


@pytest.mark.parametrize("value", ["ring", {"name": "compressed", "dtype": "bf16"}, psum()._replace(name="mine")])
def test_the_global_view_leaves_all_reduces_to_the_compiler(value):
    with pytest.raises(StrategyError, match='`transform` is "jit", under which the compiler places the all-reduces'):
        jdist.mirrored(transform="jit", all_reduce=value)


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


def returning(made, exact):
    """A Reduction of one's own whose `apply` returns what `made` makes of `(sums, carry)`."""

    def apply(tree, carry, axes):
        return made(jax.lax.psum(tree, axes), carry)

    return Reduction("mine", lambda tree: () if exact else {"kept": 0.0}, apply, exact)


WRONG = {
    "no carry": (lambda sums, carry: sums, r"returned (an? \w+; it must return the pair|sums of another form)"),
    "three": (lambda sums, carry: (sums, carry, 1), r"returned a tuple of 3; it must return the pair"),
    "another carry": (
        lambda sums, carry: (sums, [1.0, 2.0]),
        r"returned carry of another form .*carry it was given: PyTree",
    ),
    "another tree": (lambda sums, carry: ([sums], carry), r"returned sums of another form .*tree it was given: PyTree"),
    "another shape": (
        lambda sums, carry: (jax.tree.map(lambda x: x[None], sums), carry),
        r"returned sums of another form .*leaf .* is float32\[1\] instead of float32\[\]",
    ),
    "another dtype": (
        lambda sums, carry: (jax.tree.map(lambda x: x.astype("bfloat16"), sums), carry),
        r"returned sums of another form .*leaf .* is bfloat16\[\] instead of float32\[\]",
    ),
}


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "for gradients"])
@pytest.mark.parametrize("name", WRONG)
def test_an_algorithm_of_ones_own_that_returns_something_else_is_refused(name, exact):
    made, message = WRONG[name]
    strategy = jdist.mirrored(["cpu:0", "cpu:1"], all_reduce=returning(made, exact))

    def step(w, batch):
        loss, grad = jdist.value_and_grad(lambda w: (w * batch["x"]).mean())(w)
        return w - grad, {"loss": loss}

    with pytest.raises(StrategyError, match=r"all-reduce mine: `apply\(tree, carry, axes\)` " + message):
        jdist.distribute(step, strategy)(1.0, {"x": np.array([1, 2], np.float32)})


def test_bytes_per_pack_may_be_one_of_numpys_integers():
    assert make_reduction({"name": "bucketed", "bytes_per_pack": np.int64(50)}).name == "bucketed(50)"
