"""What a step returned: told apart by role, and averaged over the replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.errors import StepError
from jdist.transforms.results import Traced, countable

TWO = jdist.mirrored(["cpu:0", "cpu:1"])
X = {"x": np.arange(4, dtype=np.float32), "z": np.ones(4)}


class TestResults:
    @property
    def batch(self):
        return {"y": np.arange(4, dtype=np.float32), "z": np.ones(4)}

    def test_the_state_alone(self):
        for state in (1.0, {"w": 1.0}, (1.0, 2.0)):
            new = jdist.distribute(lambda s, b: jax.tree.map(lambda w: w + 1, s), TWO)(state, self.batch)
            assert jax.tree.structure(new) == jax.tree.structure(state)
            assert float(jax.tree.leaves(new)[0]) == 2.0

    def test_metrics_are_any_tree_and_averaged_once(self):
        def step(s, b):
            loss, _ = jdist.value_and_grad(lambda w: (w * b["y"]).sum())(s)
            return s, (loss, [b["y"].sum(), jdist.all_reduce(b["y"].sum(), "sum"), 3, True, None, b["y"] > 1])

        loss, (total, summed, three, true, none, array) = jdist.distribute(step, TWO)(1.0, self.batch)[1]
        assert (float(loss), float(total), float(summed)) == (3.0, 3.0, 6.0)
        assert (float(three), float(true), none) == (3.0, 1.0, None)
        assert array.tolist() == [0.5, 0.5]

    @pytest.mark.parametrize(
        ("result", "message"),
        [
            (lambda s: (s, {}, {}), r"returned 3 values; say what they are, for example `returns="),
            (lambda s: {"w": s["w"]}, r"(?s)another tree.*\['n'\]: gone"),
            (lambda s: None, r"(?s)another tree.*\['n'\]: gone.*\['w'\]: gone"),
            (lambda s: ({"w": s["w"]}, {}), r"(?s)another tree.*\['n'\]: gone"),
            (lambda s: ({**s, "w": s["w"][:1]}, {}), r"\['w'\]: float32\[2\] before, float32\[1\] after"),
            (
                lambda s: ({**s, "n": s["n"] + 0.5}, {}),
                r"\['n'\]: int32\[\] before, float32\[\] after",
            ),
            (lambda s: ({**s, "w": s["w"].astype(jnp.bfloat16)}, {}), r"float32\[2\] before, bfloat16\[2\] after"),
        ],
    )
    def test_another_state_than_came_in(self, result, message):
        with pytest.raises(StepError, match=message):
            jdist.distribute(lambda s, b: result(s), TWO)({"w": jnp.ones(2), "n": 0}, self.batch)

    def test_another_number_of_results_than_declared(self):
        run = jdist.distribute(lambda s, b: (s, {}), TWO, returns=("state", "metrics", "examples"))
        with pytest.raises(
            StepError, match=r"returned a tuple of 2, but `returns` is \('state', 'metrics', 'examples'\)"
        ):
            run(1.0, self.batch)
        run = jdist.distribute(lambda s, b: {}, TWO, returns=("metrics", "examples"))
        with pytest.raises(StepError, match=r"returned a dict, but"):
            run(1.0, self.batch)

    def test_examples_without_rows(self):
        with pytest.raises(StepError, match="examples"):
            jdist.distribute(lambda s, b: b["y"].sum(), TWO, returns="examples")(1.0, self.batch)

    def test_one_result_comes_bare_and_a_tuple_of_one_as_a_tuple(self):
        bare = jdist.distribute(lambda b: {"x": b["x"].mean()}, TWO, args=("batch",))
        assert float(bare(X)["x"]) == 1.5
        one = jdist.distribute(lambda b: (b["x"].mean(),), TWO, args="batch", returns="metrics")
        (x,) = one(X)
        assert float(x) == 1.5

    def test_the_order_of_results_is_the_steps(self):
        run = jdist.distribute(
            lambda w, b: (b["x"].mean(), w + 1, b["x"], b["x"].sum()),
            TWO,
            returns=("metrics", "state", "examples", "per_replica"),
        )
        x, state, rows, own = run(1.0, X)
        assert (float(x), float(state), rows.tolist()) == (1.5, 2.0, [0, 1, 2, 3])
        assert own.local_results() == (1.0, 5.0)

    def test_a_key_is_no_metric(self):
        with pytest.raises(StepError, match=r"PRNG key among its metrics, which cannot be averaged.*into the state"):
            jdist.distribute(lambda s, b: (s, jax.random.key(0)), TWO)(1.0, X)


def test_metrics_that_can_be_added_up():
    assert countable(True).dtype == jnp.int32
    assert countable(jnp.bfloat16(1)).dtype == jnp.bfloat16
    assert countable(np.array([True, False])).tolist() == [1, 0]


def test_roles_without_the_states():
    assert Traced(("metrics", "state", "examples")).output_roles == ("metrics", "examples")
