"""Synchronous mode: the mean of one gradient of each worker is an update."""

import jax
import numpy as np
import optax
import pytest

import jdist
from jdist.errors import BatchError, ClosureError
from tests.by_default import some
from tests.ps.hidden_layer import BATCH, create, loss, rows, train_step
from tests.ps.real_cluster import local
from tests.ps.test_step import near

pytestmark = pytest.mark.xdist_group(__name__)  # they share their servers


@pytest.fixture(scope="module")
def strategy():
    with local(mode="sync", local_workers=2, local_ps=2, partitioner=jdist.ps.fixed_shards(2)) as made:
        yield made


ROWS = rows(60)


def trained(strategy, step, tx, **options):
    """Five steps an epoch, the last of four rows, of 16."""
    train, state = jdist.distribute(step, strategy, **options), strategy.init(lambda: create(tx))
    found = []
    for batch in strategy.distribute_dataset(jdist.data.from_arrays(ROWS, global_batch=16, epochs=3)):
        state, metrics = train(state, batch)
        found.append(metrics)
    return jax.tree.map(np.asarray, found), strategy.fetch(state)


def noiseless(state, batch):
    value, grads = jdist.value_and_grad(loss)(state.params, batch)
    rows = jdist.all_reduce(batch["mask"].sum(), "sum")
    return state.apply_gradients(grads=grads), {"loss": value, "norm": optax.tree.norm(grads), "rows": rows}


@pytest.mark.parametrize("tx", [optax.sgd(0.1, 0.9), optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(0.05))])
@pytest.mark.parametrize("options", some([{}, {"accumulate": 2}], [{}]))
def test_two_workers_and_two_servers_do_what_mirrored_does(strategy, tx, options):
    (metrics, state), (expected, one) = (
        trained(s, noiseless, tx, **options) for s in (strategy, jdist.mirrored(jax.devices()[:2]))
    )
    near(metrics, expected)
    near(state.params, one.params)
    assert [int(m["rows"]) for m in metrics[:4]] == [16, 16, 16, 12]
    assert int(state.step) == len(metrics) == 12


def test_fewer_steps_in_the_last_of_several_calls(strategy):
    def do(strategy):
        step, state = (
            jdist.distribute(noiseless, strategy, steps_per_call=3),
            strategy.init(lambda: create(optax.sgd(0.1))),
        )
        source, rows = jdist.data.from_arrays(ROWS, global_batch=16), []
        for batch in strategy.distribute_dataset(source, steps_per_call=3):
            state, metrics = step(state, batch)
            rows.append(np.asarray(metrics["rows"]).tolist())
        assert rows == [[16, 16, 16], [12]]
        return strategy.fetch(state).params

    near(do(strategy), do(jdist.mirrored(jax.devices()[:2])))


def test_a_gradient_that_is_not_finite_leaves_the_update_out(strategy):
    bad = {**BATCH, "x": np.where(np.arange(8)[:, None] == 3, np.nan, BATCH["x"])}
    state = strategy.init(lambda: create(optax.sgd(0.1)))
    step = jdist.distribute(noiseless, strategy)
    for batch in (BATCH, bad):
        state, _ = step(state, batch)
    later = [step(state, BATCH)[1]["loss"] for _ in range(20)]
    with pytest.raises(ClosureError, match="a gradient is NaN or infinite"):
        step.wait()
    done = 1 + sum(x.error is None for x in later)
    assert int(strategy.fetch(state).step) == done
    skipping = jdist.distribute(noiseless, strategy, non_finite="skip")
    for batch in (BATCH, bad, BATCH):
        state, _ = skipping(state, batch)
    assert (skipping.num_skipped, int(strategy.fetch(state).step)) == (1, done + 2)


def test_what_is_asked_wrongly(strategy):
    step, state = jdist.distribute(train_step, strategy), strategy.init(lambda: create(optax.sgd(0.1)))
    with pytest.raises(BatchError, match=r"7 rows does not divide by 2 \(2 workers' gradients in an update\)"):
        step(state, {k: v[:7] for k, v in BATCH.items()})


def test_backup_workers_leave_the_last_gradient_for_a_later_update():
    with local(mode="sync", backup_workers=1, local_workers=3, local_ps=2) as made:
        metrics, state = trained(made, noiseless, optax.sgd(0.05))
    assert int(state.step) == len(metrics) == 12
    assert all(np.isfinite(m["loss"]) for m in metrics)
