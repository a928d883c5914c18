"""Accuracy and top-k are those of scikit-learn."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics as theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import jdist

ROWS, CLASSES = 16, 5


def of(metric, predictions, labels, mask=None):
    return metric.compute(metric.update(predictions, labels, mask))


tied_logits = arrays.arrays(np.float32, (ROWS, CLASSES), elements=st.integers(-2, 2))
some_labels = arrays.arrays(np.int32, ROWS, elements=st.integers(0, CLASSES - 1))
some_weights = arrays.arrays(np.float32, ROWS, elements=st.integers(0, 4).map(lambda x: x / 4)).filter(np.any)


@settings(max_examples=60, deadline=None)
@given(tied_logits, some_labels, some_weights)
def test_they_are_those_of_scikit_learn(logits, labels, weight):
    accuracy, ids = jdist.metrics.accuracy(), logits.argmax(-1)
    expected = theirs.accuracy_score(labels, ids, sample_weight=weight)
    assert of(accuracy, logits, labels, weight) == pytest.approx(expected, rel=1e-14)
    assert of(accuracy, ids, labels, weight) == pytest.approx(expected, rel=1e-14)
    for k in range(1, CLASSES):
        expected = theirs.top_k_accuracy_score(labels, logits, k=k, sample_weight=weight, labels=range(CLASSES))
        assert of(jdist.metrics.top_k(k), logits, labels, weight) == pytest.approx(expected, rel=1e-14), k
    assert of(jdist.metrics.top_k(CLASSES), logits, labels, weight) == 1.0


@settings(max_examples=30, deadline=None)
@given(arrays.arrays(np.float32, ROWS, elements=st.integers(0, 4).map(lambda x: x / 4)), some_labels)
def test_a_threshold_is_for_one_score(scores, labels):
    labels = labels % 2
    expected = theirs.accuracy_score(labels, scores > 0.5)
    assert of(jdist.metrics.accuracy(threshold=0.5), scores, labels) == expected
    assert of(jdist.metrics.accuracy(threshold=0), scores - 0.5, labels == 1) == expected


def test_every_position_of_a_text_is_a_row():
    logits = jnp.eye(3)[jnp.array([[0, 1], [2, 2]])]
    labels, mask = jnp.array([[0, 1], [1, 2]]), jnp.array([[True, True], [True, False]])
    assert of(jdist.metrics.accuracy(), logits, labels, mask) == 2 / 3
    assert of(jdist.metrics.top_k(1), logits, labels, mask) == 2 / 3


def test_a_label_that_is_no_class_is_never_right():
    logits = jnp.array([[1.0, 2.0], [1.0, 2.0], [jnp.nan, jnp.nan]])
    labels = jnp.array([-1, 2, 0])
    assert of(jdist.metrics.top_k(2), logits, labels) == 0.0
    assert of(jdist.metrics.accuracy(), logits[:2], labels[:2]) == 0.0


@pytest.mark.parametrize("metric", [jdist.metrics.accuracy(), jdist.metrics.top_k(2)])
def test_of_no_rows_they_are_nan_with_a_warning(metric):
    with pytest.warns(UserWarning, match=f"jdist.metrics.{metric.name} is undefined, and NaN: no row counts"):
        assert math.isnan(of(metric, jnp.ones((2, 3)), jnp.zeros(2, jnp.int32), np.zeros(2, bool)))
