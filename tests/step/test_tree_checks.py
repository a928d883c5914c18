"""Checks on the trees that go in and out of a step: every complaint names the leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
            *((before, number) for before, number in ((jnp.bfloat16(1), 0.5), (jnp.float16(1), 0.5), (jnp.int8(1), 2))),
        ],
    )
    def test_python_numbers_take_the_dtype_of_before(self, before, number):
        after = check_same_state({"x": before}, {"x": number})["x"]
        assert (after.dtype, float(after)) == (before.dtype, number)
        assert not jax.typeof(after).weak_type

    @pytest.mark.parametrize(("before", "number"), [(jnp.int32(1), 0.5), (jnp.bool_(True), 2), (jnp.float32(1), 1j)])
    def test_python_numbers_that_the_dtype_of_before_cannot_hold(self, before, number):
        with pytest.raises(StepError, match=rf"\['x'\]: {before.dtype}\[\] before"):
            check_same_state({"x": before}, {"x": number})

    def test_a_number_in_place_of_a_key(self):
        with pytest.raises(StepError, match=r"\['rng'\]: key<fry>\[\] before, float32\[\] after"):
            check_same_state({"rng": jax.random.key(0)}, {"rng": 0.5})

    def test_another_dtype_or_shape_names_each_leaf_before_and_after(self):
        after = {**STATE, "w": jnp.ones((3, 2)), "half": jnp.ones(2, jnp.float32), "n": jnp.float32(1)}
        with pytest.raises(StepError) as caught:
            check_same_state(STATE, after)
        lines = str(caught.value).splitlines()
        assert "  ['half']: bfloat16[2] before, float32[2] after" in lines
        assert "  ['n']: int32[] before, float32[] after" in lines
        assert "  ['w']: float32[2, 3] before, float32[3, 2] after" in lines
        assert "keep both" in lines[-1]

    def test_a_state_that_is_one_array(self):
        with pytest.raises(StepError, match=r"the state: float32\[2\] before, float32\[3\] after"):
            check_same_state(jnp.ones(2), jnp.ones(3))

    def test_another_tree_names_what_went_and_came(self):
        with pytest.raises(StepError) as caught:
            check_same_state({"w": 1, "b": 2}, {"w": 1, "bias": jnp.ones((2, 2))})
        lines = str(caught.value).splitlines()[1:]
        assert lines == ["  ['b']: gone", "  ['bias']: new, float32[2, 2]"]

    def test_trees_that_differ_in_kind_only_show_both(self):
        with pytest.raises(StepError, match=r"(?s)before: PyTreeDef\(\(.*after:  PyTreeDef\(\["):
            check_same_state((1, 2), [1, 2])

    def test_long_lists_are_cut(self):
        with pytest.raises(StepError, match=r"and 15 more"):
            check_same_state({f"a{i}": 1 for i in range(25)}, {})

    def test_long_lists_of_dtypes_say_how_many_more(self):
        before = {f"a{i:02}": jnp.ones((), jnp.bfloat16) for i in range(25)}
        with pytest.raises(StepError, match=r"15 more"):
            check_same_state(before, {name: jnp.float32(1) for name in before})

    def test_a_key_of_another_kind(self):
        with pytest.raises(StepError, match=r"\['key'\]: key<fry>\[\] before, key<rbg>\[\] after"):
            check_same_state({"key": jax.random.key(0)}, {"key": jax.random.key(0, impl="rbg")})


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
            StepError, match=rf"the state has a leaf that is no array of numbers: \['a'\]\[1\] is a {kind}"
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

    def test_rows_that_disagree(self):
        with pytest.raises(BatchError, match=r"disagree on the number of rows: \['x'\] has 4, \['y'\] has 3"):
            self.check({"x": np.ones((4, 3)), "y": np.ones(3)})

    def test_rows_that_do_not_divide(self):
        with pytest.raises(BatchError, match=r"5 rows does not divide by 4 \(2 replicas\)\. Use 4 or 8 rows.*\"pad\""):
            self.check({"x": np.ones(5)}, parts=4)
        with pytest.raises(BatchError, match=r"5 rows .* Use 4 or 6"):
            self.check({"x": np.ones((3, 5))}, lead=1)

    def test_fewer_rows_than_parts(self):
        with pytest.raises(BatchError, match=r"Use 8 rows"):
            self.check({"x": np.ones(5)}, parts=8)

    def test_leaves_that_are_no_arrays(self):
        for leaf, kind in (("text", "a str"), (len, "a builtin"), (object(), "a object")):
            with pytest.raises(BatchError, match=rf"batch leaf \['x'\] \({kind}.*a device cannot hold"):
                self.check({"x": leaf})
        with pytest.raises(BatchError, match=r"\['x'\]\[0\] has shape \(\).*If it is part of a list.*numpy\.asarray"):
            self.check({"x": [1.0, 2.0]})

    def test_no_axis_of_rows(self):
        with pytest.raises(
            BatchError, match=r"\['x'\] has shape \(\); it needs a leading axis of rows\. Pass.*replicated"
        ):
            self.check({"x": 3})
        with pytest.raises(BatchError, match=r"the batch has shape \(3,\).*rows after the axis of steps"):
            self.check(np.ones(3), lead=1)
