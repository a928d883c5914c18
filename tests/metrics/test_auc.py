"""The area under the ROC curve is that of scikit-learn."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.exceptions
import sklearn.metrics as theirs
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import jdist
from jdist.errors import StepError

ROWS = 24


def auc(scores, labels, mask=None):
    metric = jdist.metrics.auc()
    return metric.compute(metric.update(scores, labels, mask))


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(
        arrays.arrays(np.float32, ROWS, elements=st.integers(-2, 2)),  # many ties
        arrays.arrays(np.float32, ROWS, elements=st.floats(-(2.0**99), 2.0**99, width=32)),
    ),
    arrays.arrays(np.int32, ROWS, elements=st.integers(0, 1)),
    arrays.arrays(np.float32, ROWS, elements=st.integers(0, 8).map(lambda x: x / 8)),
)
def test_it_is_that_of_scikit_learn(scores, labels, weight):
    counts = weight != 0
    assume(len(set(labels[counts])) == 2)
    expected = theirs.roc_auc_score(labels[counts], scores[counts])
    assert auc(scores, labels, counts) == pytest.approx(expected, rel=1e-12, abs=1e-15)
    expected = theirs.roc_auc_score(labels, scores, sample_weight=weight)
    assert auc(scores, labels, weight) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_scores_that_differ_in_the_last_bit_are_told_apart_and_equal_ones_count_half():
    one = np.float32(1)
    assert auc(np.array([one, np.nextafter(one, np.float32(2))]), np.array([0, 1])) == 1.0
    assert auc(np.array([one, one]), np.array([0, 1])) == 0.5
    assert auc(jnp.array([0.0, -0.0, jnp.inf, -jnp.inf]), jnp.array([0, 1, 1, 0])) == 0.875


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32, jnp.bool_])
def test_scores_of_other_dtypes(dtype):
    scores = jnp.array([0, 1, 1, 0, 1]).astype(dtype)
    assert auc(scores, jnp.array([False, True, True, True, False])) == pytest.approx(7 / 12)


def test_a_mean_over_many_rows_needs_no_pairs():
    """A hundred thousand rows of each class make 10^10 pairs."""
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=200_000).astype(np.float32), np.arange(200_000) % 2
    assert auc(scores, labels) == pytest.approx(theirs.roc_auc_score(labels, scores), rel=1e-13)


@pytest.mark.parametrize("label", [0, 1])
def test_of_one_class_alone_it_is_nan_with_a_warning_as_scikit_learns_is(label):
    with pytest.warns(sklearn.exceptions.UndefinedMetricWarning):
        assert math.isnan(theirs.roc_auc_score([label] * 3, [1, 2, 3]))
    with pytest.warns(UserWarning, match="auc is undefined, and NaN: the rows are of one class alone"):
        assert math.isnan(auc(jnp.arange(3.0), jnp.full(3, label)))
    with pytest.warns(UserWarning, match="of one class alone"):
        assert math.isnan(auc(jnp.arange(3.0), jnp.array([label, label, 1 - label]), jnp.array([1, 1, 0])))


def test_of_no_rows_and_of_nan_scores_it_is_nan_with_a_warning():
    metric = jdist.metrics.auc()
    for total in (metric.zero, metric.update(jnp.ones(2), jnp.array([0, 1]), jnp.zeros(2, bool))):
        with pytest.warns(UserWarning, match="auc is undefined, and NaN: no row counts"):
            assert math.isnan(metric.compute(total))
    with pytest.warns(UserWarning, match="1 of 3 scores are NaN"):
        assert math.isnan(auc(jnp.array([0.1, jnp.nan, 0.2]), jnp.array([0, 1, 1])))
    assert auc(jnp.array([0.1, jnp.nan, 0.2]), jnp.array([0, 1, 1]), jnp.array([True, False, True])) == 1.0


def test_labels_other_than_0_and_1_are_refused_unless_masked():
    with pytest.raises(StepError, match=r"there are labels -1, 2; they must be 0 or 1. .*`labels == number`"):
        auc(jnp.ones(4), jnp.array([-1, 0, 1, 2]))
    assert auc(jnp.ones(4), jnp.array([-1, 0, 1, 2]), jnp.array([0, 1, 1, 0])) == 0.5
