"""Several metrics as one."""

import jax.numpy as jnp

import jdist

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
