"""What a tally keeps for a run that goes on is what it has added up."""

import json
import re
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.errors import StepError
from jdist.loop.metric_totals import MetricTotals

ROWS = [(jnp.array([0.9, 0.4, 0.4]), jnp.array([1, 1, 0])), (jnp.array([0.1, 0.6]), jnp.array([0, 1]))]


class Sums(NamedTuple):
    total: object
    count: object


def own_mean():
    return jdist.metrics.of_sums(
        "own",
        lambda scores, labels, mask=None: Sums(scores.sum(), jnp.asarray(scores.size)),
        lambda total: float(total.total / total.count),
        zero=Sums(np.float32(0), np.int32(0)),
    )


METRICS = {
    "auc": jdist.metrics.auc(),
    "mean": own_mean(),
    "both": jdist.metrics.collect({"auc": jdist.metrics.auc(), "own": own_mean()}),
}


def contribution(name, scores, labels):
    return METRICS[name].update(
        *(({"auc": (scores, labels), "own": (scores, labels)},) if name == "both" else (scores, labels))
    )


@pytest.mark.parametrize("name", METRICS)
def test_a_total_of_any_form_goes_on_where_it_was(name):
    whole, first, second = (MetricTotals({"m": METRICS[name]}) for _ in range(3))
    for tally in (whole, first):
        tally.add({"m": contribution(name, *ROWS[0])}, ROWS[0])
    second.restore(json.loads(json.dumps(first.notes())))
    for tally in (whole, second):
        tally.add({"m": contribution(name, *ROWS[1])}, ROWS[1])
    expected, weight = whole.take()
    assert second.take() == (expected, weight)
    assert weight == 5


def test_a_number_in_the_place_of_a_contribution():
    totals = MetricTotals({"accuracy": jdist.metrics.accuracy()})
    text = "train_step returned a number as metric 'accuracy', which `metrics` has as jdist.metrics.accuracy. Return what its"
    with pytest.raises(StepError, match=re.escape(text)):
        totals.names({"accuracy": np.float32(0.5)}, by="train_step")
