"""Steps of several states: `step(params, opt_state, batch) -> params, opt_state, loss`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.errors import DonatedStateError, NonFiniteError, ReplicaDivergenceError, StepError
from jdist.train import Checkpointer
from tests.toys import DEVICES, TWO, every_of_one_process

EVERY = every_of_one_process()
TX = optax.adam(0.1)
SEVERAL = {"args": ("state", "state", "batch")}
RNG = np.random.default_rng(0)
BATCHES = [{"x": x, "y": x @ np.arange(1, 4, dtype=np.float32)} for x in RNG.normal(size=(6, 16, 3)).astype(np.float32)]


def step(params, opt_state, batch):
    def loss_fn(params):
        return jdist.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)

    loss, grads = jdist.value_and_grad(loss_fn)(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def create():
    params = {"w": jnp.zeros(3), "b": jnp.float32(0)}
    return params, TX.init(params)


@functools.cache
def by_hand():
    """The parameters and losses of the plain step, one device, no jdist around it."""
    (params, opt_state), losses = create(), []
    for batch in BATCHES:
        params, opt_state, loss = jax.jit(step)(params, opt_state, batch)
        losses.append(float(loss))
    return params, losses


def train(run, states, batches=BATCHES):
    losses = []
    for batch in batches:
        *states, loss = run(*states, batch)
        losses.append(loss)
    return states, losses


def near(found, expected, tolerance=1e-4):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


@pytest.fixture(params=EVERY)
def strategy(request):
    return EVERY[request.param]


class TestEveryStrategy:
    def test_computes_what_the_step_does_by_hand(self, strategy):
        run = jdist.distribute(step, strategy, **SEVERAL)
        states, losses = train(run, strategy.init(create))
        params, expected = by_hand()
        near(losses, expected)
        near(strategy.fetch(states[0]), params)
        near(strategy.fetch({"params": states[0], "opt": states[1]})["params"], params)
        strategy.check(states)
        assert isinstance(run.last_state, tuple)
        assert all(a is b for a, b in zip(run.last_state, states, strict=True))

    def test_several_steps_per_call(self, strategy):
        run = jdist.distribute(step, strategy, **SEVERAL, steps_per_call=3, returns=("state", "state", "metrics"))
        stacked = [jax.tree.map(lambda *x: np.stack(x), *BATCHES[i : i + 3]) for i in (0, 3)]
        states, losses = train(run, strategy.init(create), stacked)
        params, expected = by_hand()
        near(np.concatenate([np.asarray(x) for x in losses]), np.array(expected))
        near(strategy.fetch(states[0]), params)


# tests/conformance has the options under every strategy.
@pytest.mark.parametrize("options", [{"accumulate": 2}, {"non_finite": "skip"}, {"donate": False}], ids=str)
def test_with_options(options):
    run = jdist.distribute(step, TWO, **SEVERAL, **options)
    (params, _), losses = train(run, create())
    expected_params, expected = by_hand()
    near(losses, expected)
    near(TWO.fetch(params), expected_params)


def test_with_a_loss_scale_which_the_first_state_carries():
    run = jdist.distribute(step, TWO, **SEVERAL, precision=jdist.precision("fp16", initial_scale=2.0**6))
    states, losses = train(run, create())
    assert isinstance(states[0], jdist.StepState)
    assert isinstance(states[1], tuple)
    assert states[0]["w"].shape == (3,)
    near(losses, by_hand()[1], tolerance=2e-2)
    assert (run.num_skipped, int(states[0].loss_scale.good_steps)) == (0, len(BATCHES))
    assert TWO.fetch(states)[0].keys() == {"w", "b"}
    again = jdist.distribute(step, TWO, **SEVERAL, precision=jdist.precision("fp16"))
    states = again(*states, BATCHES[0])[:2]
    assert int(states[0].loss_scale.good_steps) == len(BATCHES) + 1


def test_with_residuals_which_the_first_state_carries(tmp_path):
    strategy = jdist.mirrored(DEVICES, all_reduce=jdist.reduction.compressed("int8"))
    run = jdist.distribute(step, strategy, **SEVERAL)
    states, losses = train(run, create())
    assert isinstance(states[0], jdist.StepState)
    assert losses[-1] < losses[0]
    run.lower(*states, BATCHES[0])
    like = run.prepare(*create(), BATCHES[0])
    assert isinstance(like, tuple)
    assert isinstance(like[0], jdist.StepState)
    with Checkpointer(tmp_path, check=strategy.check) as checkpointer:
        checkpointer.save(1, tuple(states), wait=True)
        restored = checkpointer.restore(like)
    assert restored is not None
    restored = restored.state
    near(jax.tree.leaves(restored), jax.tree.leaves(tuple(states)), tolerance=0)
    *_, loss = run(*restored, BATCHES[0])
    *_, expected = run(*states, BATCHES[0])
    assert float(loss) == float(expected)


def test_two_states_that_each_carry_a_loss_scale():
    run = jdist.distribute(step, TWO, **SEVERAL, precision=jdist.precision("fp16"))
    params, opt_state, _ = run(*create(), BATCHES[0])
    around = jdist.StepState(opt_state, params.loss_scale)
    with pytest.raises(StepError, match=r"2 of the states come as a `jdist.StepState`.*`\.user` of all but one"):
        run(params, around, BATCHES[0])


def test_old_states_are_donated_and_the_newest_is_taken_as_it_is():
    run = jdist.distribute(step, TWO, **SEVERAL)
    params, opt_state = TWO.init(create)
    first = run(params, opt_state, BATCHES[0])
    assert all(x.is_deleted() for x in jax.tree.leaves((params, opt_state)))
    with pytest.raises(DonatedStateError):
        run(params, first[1], BATCHES[0])
    run(first[0], first[1], BATCHES[0])


def test_one_compilation():
    traced = []

    def counted(*args):
        traced.append(1)
        return step(*args)

    train(jdist.distribute(counted, TWO, **SEVERAL), TWO.init(create))
    assert len(traced) <= 2  # the guard traces once


def test_lower_prepare_and_preview():
    run = jdist.distribute(step, TWO, **SEVERAL)
    params, opt_state = run.prepare(*create(), BATCHES[0])
    assert params["w"].sharding == TWO.replicated_sharding
    assert "all_reduce" in run.lower(params, opt_state, BATCHES[0]).as_text()
    preview = run.preview(params, opt_state, BATCHES[0])
    assert preview.changes_state
    assert preview.results["state"][0]["w"].shape == (3,)


def test_a_gradient_that_is_not_finite_leaves_both_states():
    run = jdist.distribute(step, TWO, **SEVERAL)
    states, _ = train(run, create())
    before = TWO.fetch(tuple(states))
    params, *_ = run(*states, {**BATCHES[0], "x": np.full((16, 3), np.nan, np.float32)})
    with pytest.raises(NonFiniteError):
        TWO.fetch(params)  # one of the states tells of it
    near(TWO.fetch(run.last_state), before, tolerance=0)


def test_replicas_that_differ():
    def wrong(params, opt_state, batch):
        return params, opt_state + batch["x"].sum(), {}

    run = jdist.distribute(wrong, TWO, **SEVERAL)
    with pytest.raises(ReplicaDivergenceError, match=r"\[1\]"):
        run(jnp.float32(0), jnp.float32(0), BATCHES[0])


def test_states_between_other_arguments_and_results(strategy):
    def mixed(batch, a, scale, b):
        return {"x": batch["x"].mean()}, a + scale, b * scale

    run = jdist.distribute(
        mixed, strategy, args=("batch", "state", "replicated", "state"), returns=("metrics", "state", "state")
    )
    metrics, a, b = run({"x": np.arange(16, dtype=np.float32)}, 1.0, 3.0, 2.0)
    assert (float(metrics["x"]), float(a), float(b)) == (7.5, 4.0, 6.0)


def test_states_alone_and_an_evaluation_of_two(strategy):
    both = jdist.distribute(lambda a, b, batch: (a + 1, b - 1), strategy, **SEVERAL)
    a, b = both({"n": 1.0}["n"], 1.0, BATCHES[0])
    assert (float(a), float(b)) == (2.0, 0.0)
    evaluate = jdist.distribute(lambda a, b, batch: {"sum": a + b}, strategy, **SEVERAL, returns=("metrics",))
    assert float(evaluate(a, b, BATCHES[0])["sum"]) == 2.0
    assert float(a) == 2.0  # an evaluation donates nothing


class TestRefused:
    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (
                lambda p, o, batch: (o, p, {}),
                "takes 2 states and returned a tuple of 3 .*`return state1, state2, metrics`",
            ),
            (lambda p, o, batch: ((p, o), {}), r"another tree than it received"),
            (lambda p, o, batch: {}, r"returned a dict .*returns=\(\"metrics\",\)"),
            (lambda p, o, batch: (p, o, {}, {}), r"returns=\('state', 'state', 'metrics', 'metrics'\)"),
            (lambda p, o, batch: (p["w"], o, {}), r"another tree than it received:\n.*\[0\]"),
        ],
    )
    def test_results(self, wrong, message):
        run = jdist.distribute(wrong, TWO, **SEVERAL)
        with pytest.raises(StepError, match=message):
            run(*create(), BATCHES[0])

    def test_roles(self):
        with pytest.raises(StepError, match=r"returns as many states as it takes.*role \"replicated\""):
            jdist.distribute(step, TWO, **SEVERAL, returns=("state", "metrics"))
        with pytest.raises(
            StepError, match=r"`batch` of step has the role 'replicated'.*`args=\('state', 'state', 'batch'\)`"
        ):
            jdist.distribute(step, TWO)
