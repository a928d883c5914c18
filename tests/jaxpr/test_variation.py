"""What depends on the replica's number meets the combined gradients: the same under every strategy and option."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import jdist
from jdist.errors import ReplicaDivergenceError

STRATEGIES = {"mirrored": jdist.mirrored, "central_storage": jdist.central_storage}
SHAPES = {"whole": (), "in parts": (5,)}
X = np.array([1, 2, 3, 4], np.float32)


@pytest.fixture(params=STRATEGIES)
def two(request):
    return STRATEGIES[request.param](["cpu:0", "cpu:1"])


def options(name):
    return {name: 2} if name else {}


def batch(option):
    return np.stack([X, X]) if option == "steps_per_call" else X


def gradient(state, x):
    return jdist.value_and_grad(lambda w: jdist.mean(w.sum() * x))(state["w"])


@pytest.mark.parametrize("option", ["", "accumulate", "steps_per_call"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_state_to_which_each_replica_adds_its_own(two, shape, option):
    def step(state, x):
        _, grad = gradient(state, x)
        own = 1.0 + jdist.replica_id()
        return {
            "w": state["w"] - grad,
            "mean": jdist.aggregate(state["mean"] + own, "mean"),
            "sum": jdist.aggregate(state["sum"] + own, "sum", old=state["sum"]),
            "first": jdist.aggregate(state["first"] + own, "first"),
            "largest": state["largest"] + jdist.all_reduce(jnp.full(shape, own), "max"),
        }, {}

    five = {name: jnp.full(shape, 5.0) for name in ("mean", "sum", "first", "largest")}
    state = two.init(lambda: {"w": jnp.ones(3), **five})
    state = two.fetch(jdist.distribute(step, two, **options(option))(state, batch(option))[0])
    steps = 2 if option == "steps_per_call" else 1
    added = {"mean": 1.5, "sum": 3, "first": 1, "largest": 2}
    if option == "accumulate":  # each microbatch is a replica
        added = {"mean": 2.5, "sum": 10, "first": 1, "largest": 4}
    for name, more in added.items():
        np.testing.assert_array_equal(state[name], np.full(shape, 5 + more * steps), err_msg=name)


@pytest.mark.parametrize("option", ["", "accumulate"])
def test_results_made_of_the_loss_and_the_replicas_number(two, option):
    def step(state, x):
        loss, grad = gradient(state, x)
        own = loss * (1.0 + jdist.replica_id())
        metrics = {"own": jdist.PerReplica(own), "mean": own, "sum": jdist.all_reduce(own, "sum")}
        rows = jnp.full(x.shape, own)
        return {"w": state["w"] - grad}, metrics, rows

    run = jdist.distribute(step, two, returns=("state", "metrics", "examples"), **options(option))
    _, metrics, rows = run(two.init(lambda: {"w": jnp.ones(3)}), X)
    own = [7.5, 15.0, 22.5, 30.0] if option else [7.5, 15.0]  # each microbatch is a replica
    assert [float(x) for x in metrics["own"].local_results()] == own
    assert (float(metrics["mean"]), float(metrics["sum"])) == (np.mean(own), np.sum(own))
    assert rows.tolist() == np.repeat(own, 4 // len(own)).tolist()


def test_per_replica_results_of_several_steps_lead_with_the_replicas(two):
    def step(state, x):
        _, grad = gradient(state, x)
        return {"w": state["w"] - 0 * grad}, jdist.PerReplica({"early": x.sum(), "late": grad[0]})

    xs = np.stack([X, X + 10, X + 20])
    _, results = jdist.distribute(step, two, steps_per_call=3)(two.init(lambda: {"w": jnp.ones(3)}), xs)
    first, second = results.local_results()
    assert (first["early"].tolist(), second["early"].tolist()) == ([3, 23, 43], [7, 27, 47])
    assert first["late"].tolist() == second["late"].tolist() == [2.5, 12.5, 22.5]


def test_a_callback_that_sees_both_is_called_once_on_each_replica(two):
    seen = []

    def step(state, x):
        loss, grad = gradient(state, x)
        io_callback(lambda x: seen.append(float(x)), None, loss * (1.0 + jdist.replica_id()))
        jdist.first_replica_only(jax.debug.callback, lambda x: seen.append(float(x)), -loss)
        return {"w": state["w"] - grad}, {}

    jdist.distribute(step, two)(two.init(lambda: {"w": jnp.ones(3)}), X)
    jax.effects_barrier()
    assert sorted(seen) == [-7.5, 7.5, 15.0]


@pytest.mark.parametrize("option", ["", "accumulate"])
def test_a_combined_gradient_is_nobodys_own_whatever_it_was_made_of(two, option):
    def step(state, x):
        noise = jax.random.normal(jdist.replica_rng(jax.random.key(0)), x.shape)
        loss, grad = jdist.value_and_grad(lambda w: jdist.mean(w.sum() * (x + 0 * noise)))(state["w"])
        return {"w": state["w"] - grad}, {"loss": loss, "grad": grad}

    run = jdist.distribute(step, two, **options(option))
    state = two.init(lambda: {"w": jnp.ones(3)})
    state, metrics = run(state, X)
    assert (float(metrics["loss"]), two.fetch(state)["w"].tolist()) == (7.5, [-1.5] * 3)


@pytest.mark.parametrize("option", ["", "accumulate", "steps_per_call"])
@pytest.mark.parametrize("shape", [(), (6,)], ids=["whole", "in parts"])
def test_state_that_each_replica_writes_by_its_number_alone_is_refused(two, shape, option):
    """Also where each replica keeps a part only, in which the difference would be lost."""

    def step(state, x):
        _, grad = gradient(state, x)
        return {"w": state["w"] - grad, "own": state["own"] + jdist.replica_id()}, {}

    def make():
        return two.init(lambda: {"w": jnp.ones(3), "own": jnp.zeros(shape, jnp.int32)})

    with pytest.raises(ReplicaDivergenceError, match=r"1 of .* leaves .*\n  \['own'\]: all replicas differ"):
        jdist.distribute(step, two, **options(option))(make(), batch(option))
    jdist.distribute(step, two, check_replicas=0, **options(option))(make(), batch(option))
