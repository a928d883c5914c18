"""The confusion matrix, precision, recall and F1 are those of scikit-learn."""

import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics as theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import jdist
from jdist.errors import StepError

ROWS, CLASSES = 16, 4
SCORES = {
    "precision": (jdist.metrics.precision, theirs.precision_score),
    "recall": (jdist.metrics.recall, theirs.recall_score),
    "f1": (jdist.metrics.f1, theirs.f1_score),
}


def of(metric, predictions, labels, mask=None):
    return metric.compute(metric.update(predictions, labels, mask))


some_classes = arrays.arrays(np.int32, ROWS, elements=st.integers(0, CLASSES - 1))  # some do not occur
some_weights = arrays.arrays(np.float32, ROWS, elements=st.integers(0, 4).map(lambda x: x / 4)).filter(np.any)


@settings(max_examples=50, deadline=None)
@given(some_classes, some_classes, some_weights)
def test_they_are_those_of_scikit_learn(predictions, labels, weight):
    known = {"labels": range(CLASSES), "sample_weight": weight}
    expected = theirs.confusion_matrix(labels, predictions, **known)
    np.testing.assert_array_equal(of(jdist.metrics.confusion_matrix(CLASSES), predictions, labels, weight), expected)
    for name, (ours, theirs_) in SCORES.items():
        for average in ("macro", "micro", "weighted", None):
            expected = theirs_(labels, predictions, average=average, zero_division=0, **known)
            found = of(ours(CLASSES, average), predictions, labels, weight)
            np.testing.assert_allclose(found, expected, rtol=1e-14, atol=0, err_msg=f"{name} {average}")


@settings(max_examples=20, deadline=None)
@given(some_classes, some_classes)
def test_of_two_classes_and_from_logits(predictions, labels):
    predictions, labels = predictions % 2, labels % 2
    for ours, theirs_ in SCORES.values():
        expected = theirs_(labels, predictions, average="binary", zero_division=0)
        assert of(ours(2, "binary"), jnp.eye(2)[predictions], labels) == pytest.approx(expected, rel=1e-14)


def test_counts_stay_integers_and_have_the_labels_in_rows():
    found = of(jdist.metrics.confusion_matrix(3), jnp.array([2, 2, 0]), jnp.array([1, 1, 0]))
    assert found.tolist() == [[1, 0, 0], [0, 0, 2], [0, 0, 0]]
    assert found.dtype == np.int64


def test_nothing_is_a_matrix_of_zeros_and_scores_of_zero():
    assert jdist.metrics.confusion_matrix(2).compute(jdist.metrics.confusion_matrix(2).zero).tolist() == [
        [0, 0],
        [0, 0],
    ]
    for average in ("macro", "micro", "weighted"):
        metric = jdist.metrics.f1(2, average)
        assert metric.compute(metric.zero) == 0.0


@pytest.mark.parametrize(("prediction", "label"), [(3, 0), (0, 3), (-1, 0), (0, -1)])
def test_what_is_no_class_is_refused_unless_masked(prediction, label):
    metric = jdist.metrics.confusion_matrix(3)
    predictions, labels = jnp.array([1, prediction]), jnp.array([1, label])
    with pytest.raises(
        StepError, match="rows of weight 1 have a label or a prediction outside of the 3 classes 0 to 2"
    ):
        of(metric, predictions, labels)
    assert of(metric, predictions, labels, jnp.array([True, False])).sum() == 1
