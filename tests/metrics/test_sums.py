"""Metrics of sums, also one's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.errors import StepError


def histogram():
    def sums(values, mask=None):
        return {"counts": jnp.zeros(3, jnp.int32).at[values].add(mask.astype(jnp.int32)), "seen": mask.any()}

    return jdist.metrics.of_sums("histogram", sums, lambda total: total, zero={"counts": np.zeros(3), "seen": 0})


@pytest.mark.parametrize("transform", ["shard_map", "jit"])
def test_one_of_your_own_counts_bools_and_adds_up_steps(transform):
    metric, strategy = histogram(), jdist.mirrored(jax.devices()[:3], transform=transform)
    step = jdist.distribute(
        lambda state, batch: (state, metric.update(batch["x"], batch["mask"])), strategy, steps_per_call=2
    )
    source = jdist.data.from_arrays({"x": np.arange(17) % 3}, global_batch=6)
    batches = strategy.distribute_dataset(source, steps_per_call=2)
    total = metric.total(step(jnp.zeros(2), batch)[1] for batch in batches)
    assert total["counts"].tolist() == [6, 6, 5]
    assert total["counts"].dtype == np.float64  # its zero is of floats
    assert int(total["seen"]) == 3 * (
        3 if transform == "shard_map" else 1
    )  # bools count: a replica each, in three steps


def test_what_strategy_run_returns_holds_the_sums_once_a_replica():
    metric, strategy = jdist.metrics.mean(), jdist.mirrored()
    result = strategy.run(lambda: metric.update(jnp.ones(2)))
    assert metric.total([result.local_results()[0]])["weight"] == 2 * strategy.num_replicas
    with pytest.raises(
        StepError, match=r"has the tree PyTreeDef\(CustomNode\(PerReplica.*`result.local_results\(\)\[0\]`"
    ):
        metric.add(metric.zero, result)


def test_what_update_did_not_return_is_refused():
    metric = jdist.metrics.confusion_matrix(3)
    with pytest.raises(StepError, match="confusion_matrix: a contribution has the tree"):
        metric.compute(np.zeros((3, 3)))
    with pytest.raises(StepError, match=r"leaf \['matrix'\] of a contribution has shape \(2, 2\), .* ends in \(3, 3\)"):
        metric.add(metric.zero, {"matrix": np.zeros((2, 2)), "outside": 0})
    with pytest.raises(StepError, match=r"shape \(3,\), .* ends in \(3, 3\)"):
        metric.add(metric.zero, {"matrix": np.zeros(3), "outside": 0})


def test_a_sum_that_is_no_number_is_refused():
    metric = jdist.metrics.of_sums("bad", lambda mask=None: {"x": "text"}, lambda total: total, zero={"x": 0})
    with pytest.raises(StepError, match=r"leaf \['x'\] is 'text', a str"):
        metric.update()
