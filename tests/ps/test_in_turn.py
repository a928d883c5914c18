"""Several steps that update one state, over several servers: what each of these has a copy of stays the same on all."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.ps.program.layout import make_layout
from jdist.ps.program.partition import fixed_shards
from tests.ps.hidden_layer import BATCH, loss
from tests.ps.program.test_split_step import apart
from tests.ps.real_cluster import local


def fresh():
    params = {"a": jnp.asarray(np.random.default_rng(1).normal(size=(3, 4)), jnp.float32), "b": jnp.ones(4)}
    counts = {"n": jnp.int32(0), "m": jnp.int32(0)}
    return {"params": params, "rate": jnp.float32(1), "key": jax.random.key(3), **counts}


def updating(change):
    """A step that updates the parameters, and changes what servers have a copy of."""

    def step(state, batch):
        value, grads = jdist.value_and_grad(loss)(state["params"], batch)
        params = jax.tree.map(lambda p, g: p - 0.01 * g, state["params"], grads)
        return {**state, "params": params, **change(state)}, {"loss": value}

    return step


def slower(state):
    return {"rate": state["rate"] * 0.9, "key": jax.random.split(state["key"])[0], "n": state["n"] + 1}


def faster(state):
    return {"rate": state["rate"] + 0.1, "key": jax.random.fold_in(state["key"], 7), "n": state["n"] + 1}


CASES = {  # what two steps change, and whether closures of both may be under way
    "nothing": (lambda s: {}, lambda s: {}, True),
    "one leaf in the same way": (lambda s: {"n": s["n"] + 1}, lambda s: {"n": s["n"] + 1}, True),
    "a leaf each": (lambda s: {"n": s["n"] + 1}, lambda s: {"m": s["m"] + 1}, True),
    "one leaf, by one of them": (lambda s: {"n": s["n"] + 1}, lambda s: {}, True),
    "all in the same way": (slower, lambda s: slower(s), True),
    "one leaf in two ways": (lambda s: {"rate": s["rate"] * 0.9}, lambda s: {"rate": s["rate"] + 0.1}, False),
    "one leaf, and one that follows it": (
        lambda s: {"n": s["n"] + 1},
        lambda s: {"m": s["m"] + s["n"]},
        False,
    ),
    "the same, and more": (
        lambda s: {"n": s["n"] + 1, "m": s["n"]},
        lambda s: {"n": s["n"] + 1},
        False,
    ),
}


def layout_of(*steps, num_ps):
    parts = [apart(step, fresh(), BATCH)[0] for step in steps]
    return make_layout(parts, num_ps=num_ps, partitioner=fixed_shards(2))


@pytest.mark.parametrize("case", CASES)
def test_only_steps_whose_copies_could_differ_take_turns(case):
    a, b, may_mix = CASES[case]
    layout = layout_of(updating(a), updating(b), num_ps=2)
    assert len(layout.shards) == 2
    assert layout.in_turn == (frozenset() if may_mix else {(0, 1), (1, 0)})
    assert layout_of(updating(a), updating(b), num_ps=1).in_turn == frozenset()  # one copy of all there is


def test_a_step_that_only_reads_takes_its_turn():
    layout = layout_of(updating(slower), lambda state, batch: (state, loss(state["params"], batch)), num_ps=1)
    assert layout.in_turn == {(0, 1), (1, 0)}


def test_two_optimisers_of_one_state_do_not_wait_for_each_other():
    """As of a GAN: each has its parameters, its moments and its count; both count the same steps."""
    tx = optax.adam(optax.cosine_decay_schedule(0.1, 10))

    def create():
        params = fresh()["params"]
        return {"params": params, "opt": {k: tx.init(p) for k, p in params.items()}, "steps": jnp.int32(0)}

    def of(name):
        def step(state, batch):
            value, grads = jdist.value_and_grad(loss)(state["params"], batch)
            updates, opt = jdist.optimizer(tx).update(grads[name], state["opt"][name], state["params"][name])
            params = {**state["params"], name: optax.apply_updates(state["params"][name], updates)}
            return {"params": params, "opt": {**state["opt"], name: opt}, "steps": state["steps"] + 1}, value

        return step

    parts = [apart(of(name), create(), BATCH)[0] for name in "ab"]
    layout = make_layout(parts, num_ps=2, partitioner=fixed_shards(2))
    assert len(layout.shards) == 2
    assert len(layout.groups.everywhere) == 5  # two counts of each optimiser, and the steps
    assert layout.in_turn == frozenset()


def test_the_copies_of_all_servers_are_the_state_of_one_device():
    def do(strategy):
        steps = [jdist.distribute(updating(change), strategy) for change in (slower, faster)]
        state = strategy.init(fresh)
        for i in range(60):
            state, _ = steps[(i // 2) % 2](state, BATCH)
        return strategy.fetch(state)

    expected = do(jdist.one_device())
    with local(local_workers=2, local_ps=2, partitioner=fixed_shards(2)) as strategy:
        found, job = do(strategy), strategy.coordinator._job
        copies = [
            {rows.of: np.asarray(x) for rows, x in zip(shard.rows, kept, strict=True)}
            for shard, kept in zip(job._layout.shards, job._coordinator.snapshots.take().kept, strict=True)
        ]
        everywhere = job._layout.groups.everywhere
    assert len(copies) == 2
    assert len(everywhere) == 3
    for i in everywhere:
        np.testing.assert_array_equal(copies[0][i], copies[1][i])
    np.testing.assert_allclose(found["rate"], expected["rate"], rtol=1e-6)
    assert int(found["n"]) == 60
    np.testing.assert_array_equal(*(jax.random.key_data(x["key"]) for x in (found, expected)))
