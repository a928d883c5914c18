"""Several metrics as one."""

import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.errors import StepError

METRIC = jdist.metrics.collect({"loss": jdist.metrics.mean(), "auc": jdist.metrics.auc()})
INPUTS = {"loss": jnp.array([1.0, 3.0, 7.0]), "auc": (jnp.array([0.2, 0.8, 0.5]), jnp.array([0, 1, 1]))}


def test_each_has_its_inputs_and_all_the_mask():
    mask = jnp.array([True, True, False])
    found = METRIC.compute(METRIC.total([METRIC.update(INPUTS, mask), METRIC.update(INPUTS, mask=None)]))
    assert list(found) == ["loss", "auc"]  # not in alphabetical order
    assert found == {"loss": 15 / 5, "auc": 1.0}


def test_its_contribution_is_that_of_each_by_name():
    """So a step may also return a dict of contributions itself, each with a mask of its own."""
    loss, auc = jdist.metrics.mean(), jdist.metrics.auc()
    by_hand = {"auc": auc.update(*INPUTS["auc"]), "loss": loss.update(INPUTS["loss"], jnp.array([0.5, 0.5, 0.0]))}
    assert METRIC.compute(by_hand) == {"loss": 2.0, "auc": 1.0}


def test_collections_nest():
    nested = jdist.metrics.collect({"eval": METRIC, "more": jdist.metrics.mean()})
    found = nested.compute(nested.update({"eval": INPUTS, "more": jnp.ones(3)}))
    assert found == {"eval": {"loss": 11 / 3, "auc": 1.0}, "more": 1.0}


@pytest.mark.parametrize("metrics", [{}, [jdist.metrics.mean()], None])
def test_what_is_no_dict_of_metrics_is_refused(metrics):
    with pytest.raises(StepError, match=r"`metrics` is .*; it must be a dict of metrics by name"):
        jdist.metrics.collect(metrics)


@pytest.mark.parametrize("metrics", [{"loss": jdist.metrics.mean}, {1: jdist.metrics.mean()}])
def test_what_is_no_metric_is_refused(metrics):
    with pytest.raises(StepError, match="each name is text and each value a metric"):
        jdist.metrics.collect(metrics)


def test_names_that_do_not_fit_are_refused():
    with pytest.raises(
        StepError, match=r"`inputs` has 'Loss', of which .* there are 'loss', 'auc'. Did you mean 'loss'\?"
    ):
        METRIC.update({"Loss": INPUTS["loss"]})
    with pytest.raises(StepError, match="`inputs` lacks 'auc'; every metric needs its own"):
        METRIC.update({"loss": INPUTS["loss"]})
    with pytest.raises(StepError, match="a contribution lacks 'loss'"):
        METRIC.add(METRIC.zero, {"auc": METRIC.zero["auc"]})
    with pytest.raises(StepError, match="a total is a ndarray; it must be a dict with the names 'loss', 'auc'"):
        METRIC.compute(np.zeros(2))
