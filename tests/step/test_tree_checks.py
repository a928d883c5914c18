"""Checks on the trees that go in and out of a step: every complaint names the leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.errors import BatchError, DonatedStateError, StepError
from jdist.step.tree_checks import check_arrays, check_batch, check_same_state, summary
from jdist.support.arrays import check_not_donated

STATE = {"w": jnp.ones((2, 3)), "n": jnp.int32(1), "key": jax.random.key(0), "half": jnp.ones(2, jnp.bfloat16)}


class TestSameState:
    def test_the_same_passes(self):
        after = check_same_state(STATE, {**STATE, "w": STATE["w"] + 1})
        assert after["w"].sum() == 12
        assert after["key"] is STATE["key"]

    @pytest.mark.parametrize(
        ("before", "number"),
        [
            (jnp.int32(1), 2),
            (jnp.float32(1), 2),
            (jnp.float16(1), 2),
            (jnp.bfloat16(1), 0.5),
            (jnp.float16(1), 0.5),
            (jnp.int8(1), 2),
        ],
    )
    def test_python_numbers_take_the_dtype_of_before(self, before, number):
        after = check_same_state({"x": before}, {"x": number})["x"]
        assert (after.dtype, float(after)) == (before.dtype, number)
        assert not jax.typeof(after).weak_type

    def test_another_dtype_or_shape_names_each_leaf_before_and_after(self):
        after = {**STATE, "w": jnp.ones((3, 2)), "half": jnp.ones(2, jnp.float32), "n": jnp.float32(1)}
        with pytest.raises(StepError) as caught:
            check_same_state(STATE, after)
        lines = str(caught.value).splitlines()
        assert "  ['half']: bfloat16[2] before, float32[2] after" in lines
        assert "  ['n']: int32[] before, float32[] after" in lines
        assert "  ['w']: float32[2, 3] before, float32[3, 2] after" in lines
        assert "keep both" in lines[-1]

    def test_another_tree_names_what_went_and_came(self):
        with pytest.raises(StepError) as caught:
            check_same_state({"w": 1, "b": 2}, {"w": 1, "bias": jnp.ones((2, 2))})
        lines = str(caught.value).splitlines()[1:]
        assert lines == ["  ['b']: gone", "  ['bias']: new, float32[2, 2]"]

    @pytest.mark.parametrize(
        ("before", "after", "message"),
        [
            ({"x": jnp.int32(1)}, {"x": 0.5}, r"\['x'\]: int32\[\] before"),
            ({"x": jnp.bool_(True)}, {"x": 2}, r"\['x'\]: bool\[\] before"),
            ({"x": jnp.float32(1)}, {"x": 1j}, r"\['x'\]: float32\[\] before"),
            ({"rng": STATE["key"]}, {"rng": 0.5}, r"\['rng'\]: key<fry>\[\] before, float32\[\] after"),
            (STATE["key"], jax.random.key(0, impl="rbg"), r"the state: key<fry>\[\] before, key<rbg>\[\] after"),
            (jnp.ones(2), jnp.ones(3), r"the state: float32\[2\] before, float32\[3\] after"),
            ((1, 2), [1, 2], r"(?s)before: PyTreeDef\(\(.*after:  PyTreeDef\(\["),
            ({f"a{i}": 1 for i in range(25)}, {}, "and 15 more"),
            ([jnp.bfloat16(1)] * 25, [jnp.float32(1)] * 25, "15 more"),
        ],
    )
    def test_what_is_refused(self, before, after, message):
        with pytest.raises(StepError, match=message):
            check_same_state(before, after)


class TestNotDonated:
    def test_the_first_deleted_leaf_is_named(self):
        gone = jnp.ones(3)
        gone.delete()
        check_not_donated({"a": jnp.ones(2), "b": np.ones(2), "c": 3})
        with pytest.raises(DonatedStateError, match=r"donated to an earlier call.*\['b'\].*last_state.*donate=False"):
            check_not_donated({"a": jnp.ones(2), "b": gone})
        with pytest.raises(DonatedStateError, match=r"first: the state\)"):
            check_not_donated(gone)


class TestArrays:
    def test_arrays_and_numbers_pass(self):
        check_arrays({"a": 1, "b": 1.5, "c": 1j, "d": True, "e": np.ones(2), "f": np.float32(1), **STATE}, "it")

    @pytest.mark.parametrize(("leaf", "kind"), [("text", "str"), (len, "builtin"), (object(), "object"), ({1}, "set")])
    def test_others_are_named(self, leaf, kind):
        with pytest.raises(
            StepError, match=rf"the state has a leaf that is not an array of numbers: \['a'\]\[1\] is a {kind}"
        ):
            check_arrays({"a": [1, leaf]}, "the state")
        with pytest.raises(StepError, match="itself is a"):
            check_arrays(leaf, "the state")

    @pytest.mark.parametrize("dtype", ["U1", "O", "M8[s]", "V3", np.dtypes.StringDType(), [("a", "f4")]])
    def test_arrays_of_something_else_than_numbers_are_named(self, dtype):
        with pytest.raises(StepError, match=r"\['a'\] is a ndarray of .*\. Keep text"):
            check_arrays({"a": np.zeros(2, dtype)}, "the state")
        with pytest.raises(BatchError, match=r"batch leaf \['a'\] \(a ndarray\) has dtype"):
            check_batch({"a": np.zeros(2, dtype)}, parts=1, explanation="")

    def test_the_remedy_may_be_another(self):
        with pytest.raises(StepError, match=r"is a str\. Go away\.$"):
            check_arrays("a", "it", "Go away.")


def test_a_summary_shows_the_first_leaves():
    tree = {
        "a": jnp.ones(2),
        "b": np.ones((1, 2), np.int8),
        "c": 1.5,
        "d": np.array("x"),
        "e": jax.random.key(0),
        "f": 0,
    }
    expected = "['a'] float32[2], ['b'] int8[1, 2], ['c'] float, ['d'] ndarray of <U1 and 2 more leaves"
    assert summary(tree) == expected
    assert summary(jax.ShapeDtypeStruct((3,), jnp.int32)) == "int32[3]"
    assert summary({}) == "no leaves (dict)"


class TestBatch:
    def check(self, batch, parts=2, lead=0):
        check_batch(batch, parts=parts, explanation="2 replicas", lead=lead)

    def test_rows_that_agree_and_divide_pass(self):
        self.check({"x": np.ones((4, 3)), "y": np.ones(4)})
        self.check({"x": np.ones((3, 4)), "y": np.ones((3, 4, 5))}, lead=1)
        self.check({})
        self.check({"x": np.ones((0, 3))})

    @pytest.mark.parametrize(
        ("batch", "options", "message"),
        [
            (
                {"x": np.ones((4, 3)), "y": np.ones(3)},
                {},
                r"disagree on the number of rows: \['x'\] has 4, \['y'\] has 3",
            ),
            ({"x": np.ones(5)}, {"parts": 4}, r"5 rows does not divide by 4 \(2 replicas\)\. Use 4 or 8 rows.*\"pad\""),
            ({"x": np.ones((3, 5))}, {"lead": 1}, "5 rows .* Use 4 or 6"),
            ({"x": np.ones(5)}, {"parts": 8}, "Use 8 rows"),
            ({"x": "text"}, {}, r"batch leaf \['x'\] \(a str.*a device cannot hold"),
            ({"x": len}, {}, r"batch leaf \['x'\] \(a builtin.*a device cannot hold"),
            ({"x": object()}, {}, r"batch leaf \['x'\] \(a object.*a device cannot hold"),
            ({"x": [1.0]}, {}, r"\['x'\]\[0\] has shape \(\).*If it is part of a list.*numpy\.asarray"),
            ({"x": 3}, {}, r"\['x'\] has shape \(\); it needs a leading axis of rows\. Pass.*replicated"),
            (np.ones(3), {"lead": 1}, r"the batch has shape \(3,\).*rows after the axis of steps"),
        ],
    )
    def test_what_is_refused(self, batch, options, message):
        with pytest.raises(BatchError, match=message):
            self.check(batch, **options)


def test_a_step_that_returns_its_metrics_alone_reads_which_option_says_so():
    step = jdist.distribute(lambda state, batch: {"loss": batch["x"].sum()}, jdist.mirrored(["cpu:0", "cpu:1"]))
    with pytest.raises(StepError, match=r'alone, pass `returns=\("metrics",\)`'):
        step({"w": np.ones(2, np.float32)}, {"x": np.ones(4, np.float32)})
