"""Synchronous mode: the mean of one gradient of each worker is an update."""

import jax
import numpy as np
import optax
import pytest

import jdist
from jdist.errors import BatchError, ClosureError
from jdist.ps.protocol.messages import Commit, Done, Drop, Fence, Held
from jdist.ps.protocol.scheduler import Dispatch, handle
from jdist.ps.protocol.scheduler_events import (
    Answered,
    Assign,
    Decide,
    Decided,
    Lost,
    Registered,
    Reported,
    Scheduled,
    Tell,
)
from jdist.ps.protocol.sync_rounds import Rounds
from tests.by_default import some
from tests.ps.hidden_layer import BATCH, create, loss, train_step
from tests.ps.test_step import near

pytestmark = pytest.mark.xdist_group(__name__)  # they share their servers


@pytest.fixture(scope="module")
def strategy():
    partitioner = jdist.ps.fixed_shards(2)
    made = jdist.parameter_server(mode="sync", local_workers=2, local_ps=2, partitioner=partitioner)
    yield made
    made.coordinator.close()


ROWS = {
    "x": np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=60).astype(np.float32),
}


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
    made = jdist.parameter_server(mode="sync", backup_workers=1, local_workers=3, local_ps=2)
    try:
        (metrics, state) = trained(made, noiseless, optax.sgd(0.05))
    finally:
        made.coordinator.close()
    assert int(state.step) == len(metrics) == 12
    assert all(np.isfinite(m["loss"]) for m in metrics)


# ---- the machine


def machine(size, *, spare=0, workers=2, shards=2, scheduled=4):
    dispatch = Dispatch(num_shards=shards, depth=1, rounds=Rounds(size=size, spare=spare))
    assigned = {}
    for event in [*(Registered(worker=w) for w in range(workers)), Scheduled(count=scheduled)]:
        dispatch, commands = handle(dispatch, event)
        assigned |= {c.worker: c for c in commands if isinstance(c, Assign)}
    return dispatch, assigned


def report(assign, base):
    said = {"worker": assign.worker, "epoch": assign.epoch, "generation": assign.generation}
    return Reported(**said, closure=assign.closures[0], outcome="staged", base=base)


def all_answer(dispatch, message, answer):
    commands = []
    for shard in range(dispatch.num_shards):
        dispatch, more = handle(dispatch, Answered(shard=shard, message=message, answer=answer))
        commands += more
    return dispatch, commands


def told(commands):
    messages = {c.message for c in commands if isinstance(c, Tell)}
    assert len(messages) == 1
    return messages.pop()


def test_a_round_is_committed_once_all_of_it_is_staged_and_the_next_begins_after_it():
    dispatch, assigned = machine(2)
    assert sorted(a.closures for a in assigned.values()) == [(0,), (1,)]
    dispatch, commands = handle(dispatch, report(assigned[0], 0))
    assert commands == []  # the other half of the round is still computed
    dispatch, commands = handle(dispatch, report(assigned[1], 0))
    assert commands == [Decide(closures=(0, 1))]
    dispatch, commands = handle(dispatch, Decided(closures=(0, 1), commit=True))
    message = told(commands)
    assert isinstance(message, Commit)
    assert (message.closures, message.as_one) == ((0, 1), True)
    dispatch, commands = all_answer(dispatch, message, Done(version=1))
    assert sorted(c.closures for c in commands if isinstance(c, Assign)) == [(2,), (3,)]
    assert (dispatch.settled, dispatch.rounds.version) == (2, 1)


def test_a_round_that_is_decided_against_is_dropped_and_counts_as_done():
    dispatch, assigned = machine(2)
    for worker in (0, 1):
        dispatch, _ = handle(dispatch, report(assigned[worker], 0))
    dispatch, commands = handle(dispatch, Decided(closures=(0, 1), commit=False))
    message = told(commands)
    assert isinstance(message, Drop)
    dispatch, _ = all_answer(dispatch, message, Done(version=0))
    assert (dispatch.settled, dispatch.rounds.version) == (2, 0)


def test_a_worker_lost_in_a_round_costs_only_what_it_had_not_reported():
    dispatch, assigned = machine(2)
    dispatch, _ = handle(dispatch, report(assigned[0], 0))
    dispatch, commands = handle(dispatch, Lost(worker=1, epoch=assigned[1].epoch))
    fence = told(commands)
    assert isinstance(fence, Fence)
    held = Held(version=0, staged=frozenset({(assigned[1].closures[0], 0)}), applied=frozenset())
    dispatch, commands = all_answer(dispatch, fence, held)
    dispatch, commands = all_answer(dispatch, told(commands), Done(version=0))
    (again,) = [c for c in commands if isinstance(c, Assign)]
    assert (again.worker, again.closures) == (0, assigned[1].closures)
    dispatch, commands = handle(dispatch, report(again, 0))
    assert commands == [Decide(closures=(0, 1))]


def test_with_spare_workers_what_comes_last_is_forgotten_and_computed_again():
    dispatch, assigned = machine(2, spare=1, workers=3, scheduled=4)
    for worker in (0, 1):
        dispatch, commands = handle(dispatch, report(assigned[worker], 0))
    dispatch, _ = handle(dispatch, report(assigned[2], 0))
    chosen = commands[0].closures
    dispatch, commands = handle(dispatch, Decided(closures=chosen, commit=True))
    dispatch, commands = all_answer(dispatch, told(commands), Done(version=1))
    drop = told(commands)
    assert (type(drop), drop.closures) == (Drop, assigned[2].closures)
    dispatch, commands = all_answer(dispatch, drop, Done(version=1))
    again = [c for c in commands if isinstance(c, Assign)]
    assert sorted(c for a in again for c in a.closures) == sorted({0, 1, 2, 3} - set(chosen))
    # Staged from old parameters, and reported after the commit: forgotten, too.
    dispatch, commands = handle(dispatch, report(again[0], 0))
    assert isinstance(told(commands), Drop)
