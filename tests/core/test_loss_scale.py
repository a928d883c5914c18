"""Dynamic loss scaling: how the scale moves, what a step with an overflow leaves alone, and where the scale is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.core.precision import LossScale, LossScaling
from jdist.core.step_state import loss_scale_of
from jdist.errors import NonFiniteError, StepError
from jdist.train import Checkpointer

FOUR = jax.devices()[:4]
STRATEGIES = {
    "default": jdist.default,
    "one_device": jdist.one_device,
    "shard_map": lambda: jdist.mirrored(FOUR),
    "pmap": lambda: jdist.mirrored(FOUR, transform="pmap"),
    "jit": lambda: jdist.mirrored(FOUR, transform="jit"),
    "central_storage": lambda: jdist.central_storage(FOUR),
}


def numbers(loss_scale):
    return float(loss_scale.scale), int(loss_scale.good_steps), int(loss_scale.num_skipped)


def moved(scaling, *flags, start=None):
    now, found = start or scaling.begin(), []
    for flag in flags:
        now = scaling.after(now, jnp.bool_(flag))
        found.append(numbers(now))
    return found


class TestLossScaling:
    def test_it_doubles_after_so_many_finite_steps_in_a_row_and_halves_after_one_that_is_not(self):
        found = moved(LossScaling(initial=8.0, growth_interval=2), True, True, True, False, True, True, False, False)
        assert [scale for scale, _, _ in found] == [8, 16, 16, 8, 8, 16, 8, 4]
        assert [good for _, good, _ in found] == [1, 0, 1, 0, 1, 0, 0, 0]
        assert [skipped for _, _, skipped in found] == [0, 0, 0, 1, 1, 1, 2, 3]

    def test_the_numbers_of_the_literature(self):
        assert LossScaling() == LossScaling(initial=2.0**15, growth_interval=2000)

    def test_it_stays_between_one_and_what_float32_holds(self):
        scaling = LossScaling(growth_interval=1)
        assert moved(scaling, False, start=LossScale(np.float32(1), np.int32(0), np.int32(0))) == [(1.0, 0, 1)]
        assert moved(scaling, True, start=LossScale(jnp.float32(2.0**127), np.int32(0), np.int32(0)))[0][0] == 2.0**127

    @pytest.mark.parametrize("bad", [0.5, 3.0, 0, -2.0, 2.0**101, float("nan"), float("inf"), "2", True])
    def test_a_first_scale_that_is_refused(self, bad):
        with pytest.raises(StepError, match=r"`initial_scale` is .* power of two"):
            jdist.precision("fp16", initial_scale=bad)

    @pytest.mark.parametrize("bad", [0, -1, 2.5, "2", True])
    def test_a_growth_interval_that_is_refused(self, bad):
        with pytest.raises(StepError, match="`growth_interval` is"):
            jdist.precision("fp16", growth_interval=bad)


def create():
    params = {"w": jnp.array([[0.5, -0.25], [0.125, 1.0]]), "v": jnp.array([1.0, -0.5])}
    return jdist.TrainState.create(params=params, tx=optax.adam(0.1), seen=jnp.int32(0))


def train_step(state, batch):
    def loss_fn(params):
        out = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
        return jdist.mean(out - batch["y"], batch["mask"])

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads, seen=state.extra["seen"] + 1), {"loss": loss}


def batch(poison=None):
    """Eight rows; one with a value that float16 cannot hold makes the gradients of one replica overflow."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 2)).astype(np.float32)
    y = rng.normal(size=8).astype(np.float32)
    if poison is not None:
        y[poison] = 1e5
        x[poison] = 1e5
    return {"x": x, "y": y, "mask": np.ones(8, np.float32)}


def fp16(**options):
    return jdist.precision("fp16", **options)


def equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in STRATEGIES),
        *((name, {"accumulate": 2}) for name in ("shard_map", "central_storage")),
        ("pmap", {"non_finite": "skip"}),
    ],
)
def test_an_overflow_on_one_replica_leaves_the_step_out_on_all(name, options):
    strategy = STRATEGIES[name]()
    step = jdist.distribute(train_step, strategy, precision=fp16(initial_scale=64.0), **options)
    state, _ = step(strategy.init(create), batch())
    before = strategy.fetch(state)
    state, _ = step(state, batch(poison=5))  # a row of the third replica of four
    equal(strategy.fetch(state), before)  # compares the replicas, too; nothing moved, not even a counter
    assert numbers(state.loss_scale) == (32.0, 0, 1)
    state, _ = step(state, batch())
    step.wait()
    assert (numbers(state.loss_scale), step.num_skipped) == ((32.0, 1, 1), 1)
    assert (int(state.step), int(state.extra["seen"])) == (2, 2)
    assert float(np.abs(np.asarray(strategy.fetch(state).params["w"]) - before.params["w"]).max()) > 1e-3


@pytest.mark.parametrize("name", ["shard_map", "jit", "central_storage"])
def test_a_loop_of_steps_in_one_call_carries_the_scale(name):
    strategy = STRATEGIES[name]()
    step = jdist.distribute(
        train_step, strategy, steps_per_call=5, precision=fp16(initial_scale=64.0, growth_interval=2)
    )
    five = [batch(), batch(), batch(poison=0), batch(poison=7), batch()]
    state, _ = step(strategy.init(create), jax.tree.map(lambda *x: np.stack(x), *five))
    assert numbers(state.loss_scale) == (32.0, 1, 2)  # 64, 64, 128, 64, 32, 32
    assert (int(state.step), step.num_skipped) == (3, 2)


def test_a_loss_that_no_scale_mends_is_raised_at_the_smallest_scale_and_only_there():
    strategy = jdist.mirrored(FOUR)
    step = jdist.distribute(train_step, strategy, precision=fp16(initial_scale=4.0))
    state, _ = step(strategy.init(create), batch())
    before = strategy.fetch(state).params
    for _ in range(2):
        state, _ = step(state, batch(poison=1))
        step.wait()
    assert numbers(state.loss_scale) == (1.0, 0, 2)
    state, _ = step(state, batch(poison=1))
    with pytest.raises(NonFiniteError, match="the loss is NaN or infinite"):
        step.wait()
    equal(strategy.fetch(step.last_state).params, before)
    assert numbers(step.last_state.loss_scale) == (1.0, 0, 2)
    state, _ = step(step.last_state, batch())
    step.wait()
    assert numbers(state.loss_scale) == (1.0, 1, 2)


def test_skip_goes_on_at_the_smallest_scale():
    step = jdist.distribute(train_step, jdist.one_device(), non_finite="skip", precision=fp16(initial_scale=1.0))
    state = create()
    for _ in range(3):
        state, _ = step(state, batch(poison=1))
    step.wait()
    assert (numbers(state.loss_scale), step.num_skipped, int(state.step)) == ((1.0, 0, 3), 3, 0)


def test_a_scale_keeps_gradients_that_float16_would_round_to_zero():
    def small(w, batch):
        grad = jdist.grad(lambda w: jdist.mean((w @ batch["x"]) * jnp.float32(2.0**-26)))(w)
        return w - grad, {"grad": grad}

    def grad(scale):
        step = jdist.distribute(small, jdist.one_device(), precision=fp16(initial_scale=scale))
        return np.asarray(step(jnp.ones((1, 1)), {"x": np.ones((1, 1), np.float32)})[1]["grad"]).item()

    assert grad(1.0) == 0
    assert grad(2.0**10) == 2.0**-26


def test_a_gradient_in_a_scan_is_scaled_and_its_overflow_left_out():
    """What a step computes inside of a loop is judged by what it made of the state."""

    def step(w, batch):
        def one(w, x):
            loss, grad = jdist.value_and_grad(lambda w: jdist.mean(w * x))(w)
            return w - 0.1 * grad, loss

        w, losses = jax.lax.scan(one, w, batch["x"].T)
        return w, {"loss": losses.mean()}

    train = jdist.distribute(step, jdist.mirrored(FOUR), precision=fp16(initial_scale=8.0))
    w, _ = train(jnp.float32(1), {"x": np.ones((8, 3), np.float32)})
    kept = float(w.user)
    assert kept == pytest.approx(0.7)
    bad = np.ones((8, 3), np.float32)
    bad[2, 1] = 1e6
    w, _ = train(w, {"x": bad})
    assert (float(w.user), numbers(w.loss_scale)) == (kept, (4.0, 0, 1))


class TestBesideTheState:
    def test_the_state_reads_as_the_users_own(self):
        strategy = jdist.mirrored(FOUR)
        step = jdist.distribute(train_step, strategy, precision=fp16())
        state, _ = step(strategy.init(create), batch())
        assert isinstance(state, jdist.StepState)
        assert isinstance(strategy.fetch(state), jdist.TrainState)
        assert (int(state.step), int(state.user.step), float(state.loss_scale.scale)) == (1, 1, 2.0**15)
        with pytest.raises(AttributeError, match="no_such"):
            state.no_such  # noqa: B018

    def test_a_second_call_compiles_nothing(self, compiled):
        strategy = jdist.mirrored(FOUR)
        step = jdist.distribute(train_step, strategy, precision=fp16(), check_replicas=0)
        state, _ = step(strategy.init(create), batch())
        compiled.clear()
        for _ in range(2):
            state, _ = step(state, batch())
        assert compiled == []

    def test_steps_without_a_scale_take_the_state_and_hand_it_on(self):
        strategy = jdist.mirrored(FOUR)
        half = jdist.distribute(train_step, strategy, precision=fp16(initial_scale=16.0))
        full = jdist.distribute(train_step, strategy)
        evaluate = jdist.distribute(
            lambda state, batch: {"norm": optax.tree.norm(state.params)}, strategy, returns="metrics"
        )
        state, _ = half(strategy.init(create), batch())
        state, _ = full(state, batch())
        assert (numbers(state.loss_scale), int(state.step)) == ((16.0, 1, 0), 2)
        assert np.isfinite(evaluate(state, batch())["norm"])
        state, _ = half(state, batch())
        assert (numbers(state.loss_scale), int(state.step)) == ((16.0, 2, 0), 3)

    def test_a_step_without_a_state_scales_by_the_first_scale(self):
        def grad_of(batch):
            return jdist.grad(lambda w: jdist.mean(w * batch["x"]))(jnp.float32(2))

        step = jdist.distribute(grad_of, jdist.mirrored(FOUR), args="batch", returns="metrics", precision=fp16())
        assert float(step({"x": np.full(8, 0.5, np.float32)})) == 0.5

    def test_it_goes_with_residuals(self):
        strategy = jdist.mirrored(FOUR, all_reduce=jdist.reduction.compressed("bf16"))
        step = jdist.distribute(train_step, strategy, precision=fp16(initial_scale=64.0))
        state, _ = step(strategy.init(create), batch())
        residuals = jax.tree.map(np.asarray, state.residuals)
        before = strategy.fetch(state)
        state, _ = step(state, batch(poison=3))
        assert numbers(state.loss_scale) == (32.0, 0, 1)
        equal(strategy.fetch(state), before)
        equal(state.residuals, residuals)

    def test_a_restored_run_goes_on_as_if_never_stopped(self, tmp_path):
        strategy = jdist.mirrored(FOUR)
        make = lambda: jdist.distribute(train_step, strategy, precision=fp16(initial_scale=64.0, growth_interval=3))  # noqa: E731
        step = make()
        state, _ = step(strategy.init(create), batch(poison=2))
        state, _ = step(state, batch())
        with Checkpointer(tmp_path) as checkpoints:
            checkpoints.save(2, state)
            for _ in range(3):
                state, _ = step(state, batch())
            again = make()
            restored = checkpoints.restore(again.prepare(strategy.init(create), batch()))
            assert restored is not None
            resumed = restored.state
            assert numbers(loss_scale_of(resumed)) == (32.0, 1, 1)
            for _ in range(3):
                resumed, _ = again(resumed, batch())
        equal(resumed, state)
        assert (numbers(resumed.loss_scale), again.num_skipped) == ((64.0, 1, 1), 1)

    def test_a_checkpoint_goes_from_one_precision_to_another(self, tmp_path):
        strategy = jdist.mirrored(FOUR)
        half = jdist.distribute(train_step, strategy, precision=fp16(initial_scale=64.0))
        full = jdist.distribute(train_step, strategy)
        like = strategy.init(create)
        with Checkpointer(tmp_path / "full") as checkpoints:
            checkpoints.save(1, full(strategy.init(create), batch())[0])
            state = checkpoints.restore(half.prepare(like, batch())).state
            assert (numbers(state.loss_scale), int(state.step)) == ((64.0, 0, 0), 1)
            assert int(half(state, batch())[0].step) == 2
        with Checkpointer(tmp_path / "half") as checkpoints:
            checkpoints.save(1, half(strategy.init(create), batch())[0])
            state = checkpoints.restore(strategy.init(create)).state
            assert isinstance(state, jdist.TrainState)
            assert int(full(state, batch())[0].step) == 2
