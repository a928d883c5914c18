"""What metrics refuse: arguments when they are made, inputs when they are traced, contributions that are none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.errors import StepError
from jdist.metrics.in_step import class_scores

ACCURACY, AUC, MEAN = jdist.metrics.accuracy(), jdist.metrics.auc(), jdist.metrics.mean()
BOTH = jdist.metrics.collect({"loss": MEAN, "auc": AUC})
IDS = jnp.zeros(3, jnp.int32)
of_scores = functools.partial(class_scores, "jdist.metrics.top_k", labels=jnp.zeros(4, jnp.int32))
SHAPES = r"`scores` has shape \(3, 2\), `labels` has shape \(3,\).*`logits\[..., 1\] - logits"
A_THRESHOLD = r"\(threshold=0.5\): `predictions` has shape \(3, 1\).*`predictions\[..., 0\]`"


@pytest.mark.parametrize(
    ("make", "value", "says"),
    [
        *(
            (jdist.metrics.top_k, k, "`k` is .*; it must be a whole number, 1 or more")
            for k in (0, -1, 2.0, True, "5", None)
        ),
        *((jdist.metrics.accuracy, x, "`threshold` is .*; it must be a finite number") for x in ("0.5", True, [0.5])),
        *(
            (make, n, "`num_classes` is .*; it must be a whole number, 1 or more")
            for make in (jdist.metrics.confusion_matrix, jdist.metrics.precision)
            for n in (0, -2, 3.0, True, None)
        ),
        (
            functools.partial(jdist.metrics.recall, 3),
            "makro",
            r"recall: `average` is 'makro'; .*None\. Did you mean 'macro'\?",
        ),
        (functools.partial(jdist.metrics.f1, 3), "binary", 'f1: `average` is "binary", and `num_classes` is 3, not 2'),
        *(
            (jdist.metrics.collect, x, "`metrics` is .*; it must be a dict of metrics by name")
            for x in ({}, [MEAN], None)
        ),
        *(
            (jdist.metrics.collect, x, "each name is text and each value a metric")
            for x in ({"loss": jdist.metrics.mean}, {1: MEAN})
        ),
    ],
)
def test_of_arguments(make, value, says):
    with pytest.raises(StepError, match=says):
        make(value)


@pytest.mark.parametrize(
    ("update", "inputs", "says"),
    [
        (
            jdist.metrics.top_k(4).update,
            (jnp.ones((3, 3)), IDS),
            "`k` is 4, `predictions` has 3 classes; take a `k` of at most 3",
        ),
        (
            ACCURACY.update,
            (jnp.ones(3), IDS),
            r"^jdist.metrics.accuracy: `predictions` is float32\[3\], of the labels' shape.*`.*threshold",
        ),
        (
            ACCURACY.update,
            (jnp.ones((3, 2)), jnp.zeros((3, 2))),
            r"^jdist.metrics.accuracy: `labels` is float32\[3, 2\]; class numbers are .*`labels.argmax\(-1\)`",
        ),
        (
            ACCURACY.update,
            (jnp.ones((3, 2)), jnp.zeros((3, 2), int)),
            "^jdist.metrics.accuracy: .*one-hot labels become class numbers",
        ),
        (ACCURACY.update, (jnp.ones((3, 1)), IDS), "^jdist.metrics.accuracy: .*of 1 classes"),
        (jdist.metrics.accuracy(threshold=0.5).update, (jnp.ones((3, 1)), IDS), A_THRESHOLD),
        (AUC.update, (jnp.ones((3, 2)), IDS), SHAPES),
        (AUC.update, (jnp.ones(3), jnp.zeros(3)), r"`labels` is float32\[3\]"),
        *(
            (AUC.add, ((), x), "auc: a contribution is a .*; it must be what `update` returned")
            for x in (0.5, {"score": 1}, ({"score": jnp.ones(2)},))
        ),
        (
            BOTH.update,
            ({"Loss": jnp.ones(3)},),
            r"`inputs` has 'Loss', which is not a metric; the metrics are 'loss', 'auc'. Did you mean 'loss'\?",
        ),
        (BOTH.update, ({"loss": jnp.ones(3)},), "`inputs` lacks 'auc'; every metric needs its own"),
        (BOTH.add, (BOTH.zero, {"auc": ()}), "a contribution lacks 'loss'"),
        (BOTH.compute, (np.zeros(2),), "a total is a ndarray; it must be a dict with the names 'loss', 'auc'"),
        (MEAN.update, ("high",), "jdist.metrics.mean: `values` is 'high', a str"),
        *(
            (MEAN.update, (jnp.ones((2, 4)), mask), f"^jdist.metrics.mean: {says}")
            for mask, says in (
                (
                    np.ones(3, bool),
                    r"`mask` has shape \(3,\), the values \(2, 4\); the mask's shape must be the beginning",
                ),
                (np.ones((2, 4, 1)), r"`mask` has shape \(2, 4, 1\)"),
                ("all", "`mask` is 'all', a str"),
                (np.ones(2, complex), r"`mask` is complex64\[2\]; it must hold real numbers or bools"),
            )
        ),
        (of_scores, (jnp.ones((2, 3)),), r"`predictions` has shape \(2, 3\), `labels` has shape \(4,\)"),
        (of_scores, (jnp.ones((4, 3, 2)),), r"`predictions` has shape \(4, 3, 2\)"),
        (of_scores, (jnp.ones((4, 1)),), r"of 1 classes; there must be 2 or more.*`predictions\[..., 0\]`"),
        (of_scores, (jax.random.split(jax.random.key(0), 4),), "`predictions` is key<fry>"),
    ],
)
def test_of_inputs_and_contributions(update, inputs, says):
    with pytest.raises(StepError, match=says):
        update(*inputs)
