"""float32 on its way as bfloat16: what is rounded, that it is, and that servers and `fetch` are in full."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.ps.program.layout import ROUNDED, make_rounding
from jdist.ps.program.partition import fixed_shards
from jdist.ps.protocol.messages import Commit, Pull
from jdist.train import Checkpointer
from tests.by_default import some
from tests.ps.hidden_layer import BATCH, create, loss, rows, train_step
from tests.ps.program.test_split_step import apart
from tests.ps.real_cluster import local
from tests.ps.server.test_shard_server import Job, push

pytestmark = pytest.mark.xdist_group(__name__)  # they share their servers

ROWS = rows(320)


@pytest.fixture(scope="module", params=some(["async", "sync"], ["async"]))
def strategy(request):
    workers = 2 if request.param == "sync" else 1
    with local(mode=request.param, local_workers=workers, local_ps=2, partitioner=fixed_shards(2), wire="bf16") as made:
        yield made


def rounded(tree):
    return jax.tree.map(lambda x: x.astype(ROUNDED).astype(np.float32), tree)


def names(state):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]


def carrying(state, batch):
    """As layers with running statistics do: the worker computes the new from the old."""
    mean = 0.99 * state.extra["mean"] + 0.01 * batch["x"].mean(0)
    value, grads = jdist.value_and_grad(loss)(state.params, batch)
    return state.apply_gradients(grads=grads, mean=jdist.aggregate(mean, "mean")), {"loss": value}


def test_arrays_are_rounded_but_no_single_number_and_nothing_that_workers_carry():
    state = create(optax.sgd(0.1), mean=jnp.ones(3), rate=jnp.float32(0.1))

    def only_reads(state, batch):
        return state, {"loss": loss(state.params, batch) * state.extra["rate"]}

    parts = [apart(carrying, state, BATCH)[0], apart(only_reads, state, BATCH)[0]]
    found = make_rounding(parts, "bf16")
    assert {names(state)[i] for i in found.leaves} == {".params['a']", ".params['b']"}
    assert names(state).index(".extra['rate']") in parts[1].read
    shapes = {j: parts[0].update.pushed_shapes[j].shape for j in parts[0].pushed}
    assert sorted(shapes[j] for j in found.pushed[0]) == [(3, 4), (4,)]
    assert sorted(shapes.values()) == [(3,), (3, 4), (4,)]
    assert found.pushed[1] == frozenset()
    full = make_rounding(parts, "float32")
    assert (full.leaves, full.pushed) == (frozenset(), (frozenset(), frozenset()))


def rounding(**rules):
    """One shard, of which workers pull bfloat16; in synchronous mode unless there are rules."""
    return Job(1, optax.sgd(1.0), layout={"wire": "bf16", "is_sync": not rules}, **rules).restore()


def pulled(job):
    (shard,) = job.layout.shards
    _, arrays = job.clients[0].say([Pull(generation=1, known=None)])
    places = [*shard.views[0].pulled, *shard.views[0].pulled_once]
    return {job.names[shard.rows[k].of]: x for k, x in zip(places, arrays, strict=True)}


def gradients(job, value):
    return [np.full(s.shape, value, s.numpy) for s in job.layout.shards[0].views[0].pushes]


def test_the_mean_of_rounded_gradients_is_taken_in_float32():
    job = rounding()
    before, b = pulled(job), job.kept(".params['b']")
    assert before[".params['a']"].dtype == ROUNDED
    assert before[".step"].dtype == np.int32
    for closure, value in enumerate([1.0, 1 + 2**-7]):  # both are bfloat16, their mean is not
        job.clients[0].say([push(stage=True, closure=closure, base=0)], gradients(job, value))
    job.clients[0].say([Commit(generation=1, closures=(0, 1), as_one=True)], [])
    expected = b - np.float32(1 + 2**-8)
    np.testing.assert_array_equal(np.asarray(pulled(job)[".params['b']"]), expected.astype(ROUNDED))
    assert np.all(job.kept(".params['b']") == expected)


def test_a_late_gradient_that_is_given_less_weight_is_weighted_in_float32():
    job = rounding(on_stale="down_weight", max_staleness=0)
    before = job.kept(".params['b']")
    for closure in (0, 1, 2):  # of staleness 0, 1 and 2
        job.clients[0].say([push(closure=closure, base=0)], gradients(job, 1.0))
    expected = before - np.float32(1) - np.float32(0.5) - np.float32(1 / 3)
    np.testing.assert_allclose(job.kept(".params['b']"), expected, rtol=1e-6)


def trained(strategy, step, state, epochs=1):
    train, losses = jdist.distribute(step, strategy), []
    for batch in strategy.distribute_dataset(jdist.data.from_arrays(ROWS, global_batch=8, epochs=epochs)):
        state, metrics = train(state, batch)
        losses.append(metrics["loss"])
    return state, [float(x) for x in losses]


def test_half_of_the_bytes_train_nearly_as_well_and_what_the_servers_keep_is_in_full(strategy):
    state, losses = trained(strategy, train_step, strategy.init(lambda: create(optax.sgd(0.05, 0.9))))
    one = jdist.one_device()
    expected, expected_losses = trained(one, train_step, one.init(lambda: create(optax.sgd(0.05, 0.9))))
    np.testing.assert_allclose(losses, expected_losses, rtol=0.1)
    params, expected = strategy.fetch(state).params, jax.device_get(expected.params)
    for half, full, same in zip(*map(jax.tree.leaves, (params, expected, rounded(params))), strict=True):
        assert half.dtype == np.float32
        np.testing.assert_allclose(half, full, rtol=0.1, atol=0.02)
        assert np.any(half != full)  # or nothing was rounded
        assert np.any(half != same)  # so small steps are not lost


def test_an_evaluation_after_a_step_reads_rounded_parameters_and_fetch_gives_them_in_full(strategy, tmp_path):
    def params(state, batch):
        return dict(state.params)

    train, read = jdist.distribute(train_step, strategy), jdist.distribute(params, strategy, returns="metrics")
    state = strategy.init(lambda: create(optax.adam(0.1)))
    for _ in range(3):
        seen = {k: np.asarray(x) for k, x in read(state, BATCH).items()}
        full = strategy.fetch(state).params
        for name in full:
            assert full[name].dtype == np.float32
            np.testing.assert_array_equal(seen[name], rounded(full[name]))
        state, _ = train(state, BATCH)
    assert np.any(strategy.fetch(state).params["a"] != rounded(strategy.fetch(state).params["a"]))
    with Checkpointer(tmp_path / "checkpoints", check=strategy.check) as checkpoints:
        checkpoints.save(1, state, wait=True)
        restored = checkpoints.restore(state).state
    for a, b in zip(*(jax.tree.leaves(strategy.fetch(x).params) for x in (state, restored)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_two_steps_of_one_state_each_see_what_the_other_has_changed(strategy):
    def only(name):
        def step(state, batch):
            value, grads = jdist.value_and_grad(loss)(state.params, batch)
            kept = {k: g if k == name else jnp.zeros_like(g) for k, g in grads.items()}
            return state.apply_gradients(grads=kept), {"loss": value}

        return step

    def do(strategy):
        a, b = (jdist.distribute(only(name), strategy) for name in "ab")
        state = strategy.init(lambda: create(optax.sgd(0.05, 0.9)))
        losses = []
        for _ in range(3):
            state, first = a(state, BATCH)
            state, second = b(state, BATCH)
            losses += [first["loss"], second["loss"]]
        return [float(x) for x in losses]

    found = do(strategy)
    np.testing.assert_allclose(found, do(jdist.one_device()), rtol=0.02)
    assert len(set(found)) == 6


def test_what_workers_carry_does_not_stand_still(strategy):
    """In bfloat16 an average of 1 that moves by less than 0.002 a step would stay what it is."""
    far = {**BATCH, "x": np.full_like(BATCH["x"], 1.1), "mask": np.ones(8, bool)}
    state, train = (
        strategy.init(lambda: create(optax.sgd(0.01), mean=jnp.ones(3))),
        jdist.distribute(carrying, strategy),
    )
    for _ in range(10):
        state, _ = train(state, far)
    np.testing.assert_allclose(strategy.fetch(state).extra["mean"], 1.1 - 0.1 * 0.99**10, rtol=1e-5)
