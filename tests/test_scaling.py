import doctest

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import scaling
from jdist.errors import ScalingError

BATCHES = {"base_batch": 256, "global_batch": 1024}
DECAY = optax.cosine_decay_schedule(0.4, decay_steps=50)


def test_the_examples_of_the_docstrings():
    result = doctest.testmod(scaling)
    assert (result.failed, result.attempted) == (0, 7)


@pytest.mark.parametrize(("rule", "factor"), [(scaling.linear, 4.0), (scaling.square_root, 2.0)])
def test_numbers_and_schedules_come_back_as_what_they_were(rule, factor):
    assert rule(0.1, **BATCHES) == pytest.approx(0.1 * factor)
    assert rule(0.1, base_batch=1024, global_batch=256) == pytest.approx(0.1 / factor)
    assert rule(0.1, base_batch=7, global_batch=7) == 0.1
    assert rule(np.float32(0.5), base_batch=np.int64(1), global_batch=16) == 0.5 * factor**2
    schedule = rule(DECAY, **BATCHES)
    for step in (0, 20, 50):
        assert float(schedule(step)) == pytest.approx(float(DECAY(step)) * factor)


def test_where_the_gradient_does_not_change_the_linear_rule_is_exact():
    slope = jnp.array([1.0, -2.0])

    def trained(rate, steps):
        tx, params = optax.sgd(rate), jnp.zeros(2)
        state = tx.init(params)
        for _ in range(steps):
            updates, state = tx.update(jax.grad(lambda w: w @ slope)(params), state)
            params = optax.apply_updates(params, updates)
        return params

    scaled = scaling.linear(0.125, base_batch=8, global_batch=64)
    np.testing.assert_array_equal(trained(scaled, steps=3), trained(0.125, steps=24))


def test_the_averages_of_adam_span_as_many_examples_as_before():
    found = scaling.adam(DECAY, **BATCHES, b1=0.9, b2=0.999, eps=1e-6)
    for name, decay in (("b1", 0.9), ("b2", 0.999)):  # an average over 1 / (1 - b) steps
        assert 1024 / (1 - found[name]) == pytest.approx(256 / (1 - decay))
    assert found["eps"] == pytest.approx(5e-7)
    assert float(found["learning_rate"](10)) == pytest.approx(2 * float(DECAY(10)))
    assert scaling.adam(1e-3, base_batch=1, global_batch=1) == pytest.approx(
        {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.999, "eps": 1e-8}
    )


def test_adam_without_an_average_and_at_the_last_batch():
    assert scaling.adam(0.1, base_batch=1, global_batch=500, b1=0.0)["b1"] == 0.0
    assert scaling.adam(0.1, base_batch=100, global_batch=1000)["b1"] == pytest.approx(0, abs=1e-12)
    optax.adam(**scaling.adam(0.1, base_batch=100, global_batch=1000)).init(jnp.ones(2))


def test_a_warm_up_goes_up_in_equal_increments_and_lies_over_what_follows():
    rate = scaling.gradual_warmup(DECAY, steps=10, init_value=0.1)
    seen = np.array([rate(step) for step in range(60)])
    np.testing.assert_allclose(np.diff(seen[:11]), (float(DECAY(10)) - 0.1) / 10, atol=1e-7)
    np.testing.assert_allclose(seen[10:], [DECAY(step) for step in range(10, 60)])
    assert seen[0] == np.float32(0.1)
    assert float(scaling.gradual_warmup(0.5, steps=0)(0)) == 0.5


def test_a_warm_up_serves_wherever_optax_takes_a_schedule():
    """In a distributed step, jitted, behind a mask, a label and `inject_hyperparams`, it gives what it gives by itself."""
    schedule = scaling.gradual_warmup(optax.exponential_decay(0.2, 5, 0.5), steps=3)
    txs = {
        "sgd": optax.sgd(schedule),
        "hyperparameters": optax.inject_hyperparams(optax.sgd)(learning_rate=schedule),
        "labels": optax.partition({"all": optax.sgd(schedule)}, "all"),
        "optimizers": optax.chain(optax.scale_by_schedule(lambda step: -schedule(step))),
    }
    expected = -np.cumsum([schedule(step) for step in range(8)])
    for name, tx in txs.items():

        @jdist.distribute(jdist.one_device())
        def step(state, batch):
            loss, grads = jdist.value_and_grad(lambda params: params["w"] * jdist.mean(batch["x"]))(state.params)
            return state.apply_gradients(grads=grads), {"loss": loss}

        state, seen = jdist.TrainState.create(params={"w": jnp.zeros(())}, tx=tx), []
        for _ in range(8):
            state, _ = step(state, {"x": np.ones(2, np.float32)})
            seen.append(float(state.params["w"]))
        np.testing.assert_allclose(seen, expected, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: scaling.linear(0.1, base_batch=0, global_batch=8),
            "`base_batch` is 0; it must be a whole number of examples, 1",
        ),
        (lambda: scaling.linear(0.1, base_batch=8, global_batch=8.0), r"`global_batch` is 8\.0"),
        (lambda: scaling.square_root(0.1, base_batch=True, global_batch=8), "`base_batch` is True"),
        (lambda: scaling.linear("0.1", **BATCHES), "scaling.linear: the value is '0.1'; it must be a number, or a sch"),
        (lambda: scaling.square_root(None, **BATCHES), "scaling.square_root: the value is None"),
        (lambda: scaling.adam([1], **BATCHES), r"scaling.adam: the value is \[1\]"),
        (lambda: scaling.adam(0.1, **BATCHES, b2=1.0), "`b2` is 1.0; it must be a number of at least 0 and below 1"),
        (
            lambda: scaling.adam(0.1, base_batch=256, global_batch=8192),
            "8,192 is 32 times `base_batch`, 256, but with `b1`=0.9 the rule ends at 10 times.*at most 2,560",
        ),
        (lambda: scaling.gradual_warmup(0.1, steps=-1), "`steps` is -1; it must be a whole number, 0 or more"),
        (lambda: scaling.gradual_warmup(0.1, steps=1.5), r"`steps` is 1\.5"),
        (lambda: scaling.gradual_warmup("x", steps=1), "gradual_warmup: the value is 'x'"),
        (lambda: scaling.gradual_warmup(0.1, steps=1, init_value=DECAY), "`init_value` is <function"),
    ],
)
def test_what_a_rule_cannot_take_is_refused(call, said):
    with pytest.raises(ScalingError, match=said):
        call()
