"""The loss scale of a worker: how it moves, and that an overflow is computed again instead of being left out."""

import jax
import numpy as np
import optax
import pytest

import jdist
from jdist.errors import ClosureError
from jdist.ps.worker.execute import moved_scale
from tests.by_default import some
from tests.ps.hidden_layer import BATCH, create, loss
from tests.ps.real_cluster import local

pytestmark = pytest.mark.xdist_group(__name__)  # they share their servers


def test_it_moves_as_the_scale_beside_a_state_does():
    moved, found = (8.0, 0), []
    for is_finite in (True, True, True, False, True, True, False, False):
        moved = moved_scale(*moved, is_finite=is_finite, growth_interval=2)
        found.append(moved[0])
    assert found == [8, 16, 16, 8, 8, 16, 8, 4]
    assert moved_scale(1.0, 0, is_finite=False, growth_interval=2) == (1.0, 0)
    assert moved_scale(2.0**127, 0, is_finite=True, growth_interval=1) == (2.0**127, 0)


MODES = {
    "async": {"local_workers": 1, "local_ps": 2},
    "sync": {"mode": "sync", "local_workers": 2, "local_ps": 2},
}


@pytest.fixture(scope="module", params=some(MODES, ["async"]))
def strategy(request):
    with local(partitioner=jdist.ps.fixed_shards(2), **MODES[request.param]) as made:
        yield made


def train_step(state, batch):
    value, grads = jdist.value_and_grad(loss)(state.params, batch)
    return state.apply_gradients(grads=grads), {"loss": value, "norm": optax.tree.norm(grads)}


def trained(strategy, precision, **options):
    step = jdist.distribute(train_step, strategy, precision=precision, **options)
    state, found = strategy.init(lambda: create(optax.sgd(0.05, 0.9))), []
    for _ in range(4):
        state, metrics = step(state, BATCH)
        found.append(metrics)
    return jax.tree.map(np.asarray, found), strategy.fetch(state), step


def test_an_overflow_is_computed_again_and_no_step_is_left_out(strategy):
    """The first scale is far too large: one device leaves a dozen steps out before it is small enough, a worker none."""
    options = {"accumulate": strategy.num_replicas}  # 1, and 2 in synchronous mode
    large, right = (jdist.precision("fp16", initial_scale=x) for x in (2.0**30, 2.0**8))
    metrics, state, step = trained(strategy, large, **options)
    expected, one, _ = trained(jdist.one_device(), right, **options)
    # Rounding to 11 bits differs where the rows of a product are summed in other groups: 5e-4 of numbers of about 1.
    for a, b in zip(jax.tree.leaves((metrics, state.params)), jax.tree.leaves((expected, one.params)), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-3)
    assert (int(state.step), step.num_skipped) == (4, 0)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {np.dtype("float32")}
    skipping, _, _ = trained(jdist.one_device(), large, **options)
    assert skipping[3]["loss"] == skipping[0]["loss"]


def test_what_no_scale_mends_does_what_non_finite_says(strategy):
    bad = {**BATCH, "x": np.where(np.arange(8)[:, None] == 3, np.nan, BATCH["x"])}
    precision = jdist.precision("fp16", initial_scale=8.0)
    state = strategy.init(lambda: create(optax.sgd(0.1)))
    skipping = jdist.distribute(train_step, strategy, precision=precision, non_finite="skip")
    for batch in (BATCH, bad, BATCH):
        state, _ = skipping(state, batch)
    assert (skipping.num_skipped, int(strategy.fetch(state).step)) == (1, 2)
    raising = jdist.distribute(train_step, strategy, precision=precision)
    state, _ = raising(state, bad)
    with pytest.raises(ClosureError, match="a gradient is NaN or infinite"):
        raising.wait()
    assert int(strategy.fetch(state).step) == 2


def test_an_evaluation_and_a_state_of_another_strategy(strategy):
    """A state that comes with a loss scale of its own leaves it behind: here each worker has one."""
    half = jdist.precision("fp16")
    before, _ = jdist.distribute(train_step, jdist.one_device(), precision=half)(create(optax.sgd(0.05)), BATCH)
    evaluate = jdist.distribute(
        lambda state, batch: {"loss": loss(half.cast_to_compute(state.params), batch)},
        strategy,
        returns="metrics",
        precision=half,
    )
    step = jdist.distribute(train_step, strategy, precision=half)
    found = evaluate(before, BATCH)
    assert np.isfinite(float(found["loss"]))
    state, _ = step(before, BATCH)
    assert isinstance(strategy.fetch(state), jdist.TrainState)
