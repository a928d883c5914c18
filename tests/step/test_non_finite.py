"""A NaN or infinite gradient: the state stays as it was, and the host learns which value it was, and when."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import jdist
from jdist.errors import NonFiniteError
from jdist.replica.gradients import all_finite
from jdist.step import non_finite as guard
from jdist.step.non_finite import decide
from jdist.step.program_spec import FiniteFlags
from tests.toys import TRANSFORMS, TWO, step_of

EVERY = {"default": jdist.default(), **TRANSFORMS}


def guarded(state, batch):
    loss, grads = jdist.value_and_grad(lambda p: jdist.mean(p["w"] * batch["x"] + p["b"]))(state["params"])
    params = jax.tree.map(lambda p, g: p - g, state["params"], grads)
    return {"params": params, "n": state["n"] + 1, "rng": jax.random.split(state["rng"])[0]}, {"loss": loss}


class TestNonFinite:
    def state(self):
        return {"params": {"w": 0.0, "b": 0.0}, "n": 0, "rng": jax.random.key(0)}

    def good(self, value=1.0):
        return {"x": np.full(4, value, np.float32), "z": np.ones(4)}

    @pytest.mark.parametrize("name", EVERY)
    def test_raise_keeps_the_state_and_names_step_and_leaf(self, name):
        step = jdist.distribute(guarded, EVERY[name])
        state = self.state()
        for _ in range(2):
            state, _ = step(state, self.good())
        bad = self.good()
        bad["x"][3] = np.inf  # one row, on the last replica only
        for batch in (bad, self.good()):
            state, _ = step(state, batch)
        with pytest.raises(NonFiniteError, match=r"step 2: the loss is NaN or infinite.*guarded\.last_state") as caught:
            step.wait()
        assert (caught.value.step, caught.value.leaf) == (2, "the loss")
        kept = step.last_state
        assert (int(kept["n"]), float(kept["params"]["w"])) == (2, -2.0)
        state, _ = step(kept, self.good())
        step.wait()
        assert (int(state["n"]), float(state["params"]["w"])) == (3, -3.0)
        step(state, bad)
        with pytest.raises(NonFiniteError) as again:
            step.wait()
        assert again.value.step == 4

    def test_a_gradient_is_named_where_the_loss_is_finite(self):
        def step(w, batch):
            grads = jdist.grad(lambda w: jnp.sqrt(w["a"]["b"]) + w["c"])(w)
            return jax.tree.map(lambda p, g: p - g, w, grads), {}

        run = jdist.distribute(step, TWO)
        run({"a": {"b": 0.0}, "c": 1.0}, self.good())
        with pytest.raises(NonFiniteError, match=r"the gradient of \['a'\]\['b'\]"):
            run.wait()
        assert float(run.last_state["c"]) == 1.0

    def test_it_is_raised_within_max_in_flight_calls(self):
        step = jdist.distribute(guarded, TWO, max_in_flight=3)
        state, calls = self.state(), []

        def until_raised(state):
            while len(calls) < 20:
                calls.append(len(calls))
                state, _ = step(state, self.good(np.nan))

        with pytest.raises(NonFiniteError):
            until_raised(state)
        assert len(calls) <= 6

    def test_at_step_3_of_4_in_one_call(self):
        step = jdist.distribute(guarded, TWO, steps_per_call=4)
        x = np.ones((4, 4), np.float32)
        step(self.state(), {"x": x, "z": x})
        x[2, 1] = np.nan
        step(step.last_state, {"x": x.copy(), "z": x})
        with pytest.raises(NonFiniteError) as caught:
            step.wait()
        assert caught.value.step == 6
        assert int(step.last_state["n"]) == 6
        state, _ = step(step.last_state, {"x": np.ones((4, 4), np.float32), "z": x})
        step.wait()
        assert int(state["n"]) == 10

    def test_skip_leaves_out_and_counts(self):
        step = jdist.distribute(guarded, TWO, non_finite="skip")
        state = self.state()
        assert step.num_skipped == 0
        for value in (1, np.nan, 1, np.inf, 1):
            state, metrics = step(state, self.good(value))
        assert step.num_skipped == 2
        assert (int(state["n"]), float(state["params"]["w"])) == (3, -3.0)
        assert np.isfinite(metrics["loss"])

    def test_apply_lets_through(self):
        step = jdist.distribute(guarded, TWO, non_finite="apply")
        state, metrics = step(self.state(), self.good(np.nan))
        step.wait()
        assert np.isnan(state["params"]["w"])
        assert np.isnan(metrics["loss"])
        assert int(state["n"]) == 1
        assert step.num_skipped == 0

    def test_under_accumulate(self):
        step = jdist.distribute(guarded, TWO, accumulate=2)
        bad = self.good()
        bad["x"][0] = np.nan
        step(self.state(), bad)
        with pytest.raises(NonFiniteError, match="the loss"):
            step.wait()
        assert int(step.last_state["n"]) == 0

    def test_a_gradient_inside_a_scan_is_seen_by_what_it_does_to_the_state(self):
        def step(state, batch):
            descend = lambda w, _: (w - jdist.grad(lambda w: (w * batch["x"]).mean())(w), None)  # noqa: E731
            return {**state, "w": jax.lax.scan(descend, state["w"], None, length=2)[0]}, {}

        run = jdist.distribute(step, TWO)
        run({"w": 1.0, "best": jnp.inf}, self.good())
        run.wait()  # what was infinite before may be
        run(run.last_state, self.good(np.nan))
        with pytest.raises(NonFiniteError, match=r"state leaf \['w'\]"):
            run.wait()
        assert float(run.last_state["w"]) == -1.0

    def test_a_gradient_inside_a_scan_beside_one_outside(self):
        def step(state, batch):
            descend = lambda w, _: (w - jdist.grad(lambda w: (w * batch["x"]).mean())(w), None)  # noqa: E731
            inner = jax.lax.scan(descend, state["inner"], None, length=2)[0]
            return {"inner": inner, "w": state["w"] - jdist.grad(lambda w: w**2)(state["w"])}, {}

        run = jdist.distribute(step, TWO)
        run({"inner": 1.0, "w": 1.0}, self.good(np.nan))
        with pytest.raises(NonFiniteError):
            run.wait()

    def test_a_step_that_updates_nothing_is_not_guarded(self):
        run = jdist.distribute(
            lambda w, b: jdist.value_and_grad(lambda w: w * b["x"].mean())(w)[0], TWO, returns="metrics"
        )
        assert np.isnan(run(1.0, self.good(np.nan)))
        run.wait()


def test_codes_of_several_programs_do_not_mix():
    names: list[str] = []
    assert guard.add_names(names, ["the loss", "w"]) == 0
    assert guard.add_names(names, ["state leaf b"]) == 2
    assert guard.add_names(names, ["the loss", "w"]) == 0  # traced again, for other shapes
    assert names == ["the loss", "w", "state leaf b"]


def decided(policy, token, *finite):
    token, keep = decide(jnp.array(token), [jnp.bool_(f) for f in finite], 0, policy)
    return token.tolist(), bool(keep)


def test_the_token_step_by_step():
    assert decided("raise", [0, 0], True, True) == ([0, 1], True)
    assert decided("raise", [0, 5], True, False) == ([2, 5], False)
    assert decided("raise", [2, 5], True, True) == ([2, 5], False)  # nothing changes until the host has seen it
    assert decided("skip", [1, 5], False) == ([2, 6], False)
    assert decided("skip", [1, 5], True) == ([1, 6], True)


def momentum_step(state, batch, others):
    """Leaves that depend on each other, one leaf twice, two that change places, a constant, one left alone."""
    trace = 0.9 * state["trace"] + batch
    w = state["w"] - trace
    new = {
        **state,
        "trace": trace,
        "w": w,
        "average": 0.5 * state["average"] + 0.5 * w,
        "first": w,
        "a": state["b"],
        "b": state["a"],
        "constant": jnp.float32(7),
    }
    return new, {"norm": jnp.sum(w**2)}, FiniteFlags(["the batch"], [jnp.isfinite(batch).all()], hidden=False)


@pytest.mark.parametrize("finite", [True, False])
def test_every_leaf_of_the_state_is_new_or_every_one_is_old(finite):
    names = ["trace", "w", "average", "first", "a", "b", "constant", "alone"]
    state = {name: jnp.full(2, i + 1.0) if i < 4 else jnp.float32(i) for i, name in enumerate(names)}
    batch = jnp.array([1.0, 2.0 if finite else np.nan], jnp.float32)
    run = jax.jit(lambda state: guard.guarded(momentum_step, jnp.zeros(2, jnp.int32), state, (batch, ()), "raise", []))
    token, new, outputs = run(state)
    expected, metrics, _ = momentum_step(state, batch, ())
    assert token.tolist() == ([0, 1] if finite else [1, 0])
    jax.tree.map(np.testing.assert_array_equal, new, expected if finite else state)
    if finite:
        np.testing.assert_allclose(outputs["norm"], metrics["norm"])


@pytest.mark.parametrize("place", range(11))
def test_no_place_in_a_gradient_is_overlooked(place):
    """Eleven elements do not divide among the eight replicas, of which each looks at its own part."""

    step = step_of(lambda w, batch: jnp.sqrt(w[place]) + jdist.mean(batch["x"]), rate=1.0)

    run = jdist.distribute(step, jdist.mirrored(jax.devices("cpu")))
    run(np.zeros(11, np.float32), {"x": np.ones(8, np.float32)})
    with pytest.raises(NonFiniteError, match="the gradient of the parameters"):
        run.wait()
    assert not np.asarray(run.last_state).any()


def test_a_second_gradient_that_reads_the_first_update():
    """The first update cannot wait for a flag that depends on it."""

    def step(state, batch):
        a = state["a"] - jdist.grad(lambda a: a * batch["x"].mean())(state["a"])
        b = state["b"] - jdist.grad(lambda b: b * a * batch["z"].mean())(state["b"])
        return {"a": a, "b": b}, {}

    run = jdist.distribute(step, TWO)
    ones = np.ones(4, np.float32)
    run({"a": 0.0, "b": 0.0}, {"x": ones, "z": ones})
    run(run.last_state, {"x": ones, "z": ones * np.inf})
    with pytest.raises(NonFiniteError, match="step 1: the loss"):
        run.wait()
    assert {k: float(v) for k, v in run.last_state.items()} == {"a": -1.0, "b": 1.0}


def test_the_choice_copies_nothing():
    """XLA copies a donated momentum if the parameters are computed from the one that was not chosen."""
    tx = optax.sgd(0.1, momentum=0.9)

    def step(state, batch):
        grads = jdist.grad(lambda w: jdist.mean((batch["x"] @ w) ** 2))(state["w"])
        updates, opt = tx.update(grads, state["opt"], state["w"])
        return {"w": state["w"] + updates, "opt": opt}, {}

    state = TWO.init(lambda: {"w": jnp.ones((64, 64)), "opt": tx.init(jnp.ones((64, 64)))})
    compiled = jdist.distribute(step, TWO).lower(state, {"x": np.ones((4, 64), np.float32)}).compile().as_text()
    assert " all-reduce(" in compiled
    assert "f32[64,64]{1,0} copy(" not in compiled


CONSTANT = np.zeros(3, np.float32)


def test_a_leaf_set_to_a_constant_from_outside_is_kept_too():
    def step(state, batch):
        grads = jdist.grad(lambda w: jdist.mean((batch["x"] * w) ** 2))(state["w"])
        return {"w": state["w"] - grads, "window": CONSTANT, "other": jnp.asarray(CONSTANT)}, {}

    for strategy in EVERY.values():
        run = jdist.distribute(step, strategy, non_finite="skip")
        sevens = np.full(3, 7, np.float32)
        state, _ = run({"w": 1.0, "window": sevens, "other": sevens}, {"x": np.full(4, np.nan, np.float32)})
        assert {k: np.asarray(v).tolist() for k, v in state.items()} == {"w": 1.0, "window": [7] * 3, "other": [7] * 3}


@pytest.mark.parametrize(
    ("values", "dtype", "is_finite"),
    [
        ([6e4] * 8, "float16", True),  # the sum is beyond the dtype, not beyond float32
        ([3e38] * 4, "bfloat16", False),
        ([3e38] * 4, "float32", False),  # finite, but for their sum: so the guard is defined
        ([3e38, -3e38, 3e38], "float32", True),
        ([1e308] * 2, "float64", False),
        ([1e300] * 2, "float64", True),
        ([np.inf, -np.inf], "float32", False),
        ([0.0, np.nan], "float8_e4m3fn", False),
        ([400.0] * 8, "float8_e4m3fn", True),
        ([1.0, complex(0, np.inf)], "complex64", False),
    ],
)
def test_what_counts_as_finite(values, dtype, is_finite):
    with jax.enable_x64(True):
        assert bool(all_finite(jnp.array(values, dtype))) == is_finite


@pytest.mark.parametrize("non_finite", ["raise", "apply"])
def test_references_and_ordered_callbacks_keep_their_order(non_finite):
    calls = []

    def number(x):
        calls.append(float(x))
        return np.float32(len(calls))

    def step(w, batch):
        total = jax.new_ref(jnp.float32(0))
        loss, grads = jdist.value_and_grad(lambda w: w * batch["x"].mean())(w)
        total[...] = w - grads
        total[...] *= 10
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        first = io_callback(number, shape, w - grads, ordered=True)
        second = io_callback(number, shape, loss, ordered=True)
        return total[...], {"first": first, "second": second}

    ones = {"x": np.ones(4, np.float32)}
    w, metrics = jdist.distribute(step, jdist.default(), non_finite=non_finite)(np.float32(3), ones)
    assert float(w) == 20
    assert (float(metrics["first"]), float(metrics["second"]), calls) == (1, 2, [2.0, 3.0])


def test_replicas_agree_on_what_their_own_state_tells():
    """A gradient of `jax.grad` is not seen; the statistics of one replica alone are not finite."""

    def step(state, batch):
        grad = jax.lax.pmean(jax.grad(lambda w: w * 2.0)(state["w"]), "replica")
        return {"w": state["w"] - grad, "seen": batch["x"].mean()}, {}

    run = jdist.distribute(step, TWO, non_finite="skip", check_replicas=0)
    state, _ = run({"w": 1.0, "seen": 0.0}, {"x": np.array([1, 1, np.nan, 1], np.float32)})
    assert run.num_skipped == 1
    assert [float(s.data) for s in state["w"].addressable_shards] == [1.0, 1.0]


def test_printing_in_a_step_goes_on_printing(capfd):
    def step(w, batch):
        w = w - jdist.grad(lambda w: w * batch["x"].mean())(w)
        jax.debug.print("w is {}", w)
        return w, {}

    jdist.distribute(step, jdist.default())(jnp.float32(3), {"x": np.ones(4, np.float32)})
    jax.effects_barrier()
    assert "w is 2.0" in capfd.readouterr().out


@pytest.mark.parametrize("limit", [1, 2, 3, 8])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_nothing_hides_a_nan(limit, calls):
    step = step_of(lambda w, batch: jnp.mean(batch["x"] * w), rate=1.0)

    run = jdist.distribute(step, TWO, max_in_flight=limit)
    state = jnp.float32(1)

    def train():
        now = state
        for _ in range(calls):
            now, _ = run(now, {"x": np.full(4, np.nan, np.float32)})
        TWO.check(now)

    with pytest.raises(NonFiniteError):
        train()


def test_two_models_of_one_step_are_told_of_their_own_errors():
    """In turn; each is told at its own calls, and the steps of the healthy one all count."""

    def step(state, batch):
        _, grads = jdist.value_and_grad(lambda w: jnp.mean(batch["x"] @ w))(state["w"])
        return {"w": state["w"] - 0.1 * grads, "n": state["n"] + 1}, {}

    strategy = jdist.mirrored(jax.devices()[:2])
    good, bad = {"x": np.ones((4, 3), np.float32)}, {"x": np.full((4, 3), np.nan, np.float32)}
    for fetched in (False, True):
        run = jdist.distribute(step, strategy)
        first, second = ({"w": jnp.ones(3), "n": jnp.int32(0)} for _ in range(2))
        for i in range(40):
            second, _ = run(second, good)
            if i == 30 and fetched:
                with pytest.raises(NonFiniteError, match="step 10"):
                    strategy.fetch(first)
                break
            try:
                first, _ = run(first, bad if i == 10 else good)
            except NonFiniteError:
                break
        else:
            pytest.fail("nobody was told")
        assert int(strategy.fetch(second)["n"]) == i + 1
        run.wait()


def test_a_state_of_unknown_origin_is_taken_once_the_newest_is_known_to_be_right():
    def step(state, batch):
        _, grad = jdist.value_and_grad(lambda w: jnp.mean(batch["x"] * w))(state)
        return state - 0.1 * grad, {}

    run = jdist.distribute(step, jdist.one_device())
    state, _ = run(jnp.float32(1), {"x": np.float32([np.nan])})
    with pytest.raises(NonFiniteError, match="step 0"):
        run(jax.device_put(np.asarray(state) + 0), {"x": np.float32([1])})


@pytest.mark.parametrize("strategy", [jdist.one_device("cpu:0"), jdist.mirrored(["cpu:0", "cpu:1"])])
def test_without_gradients_only_what_a_step_changes_is_looked_at(strategy):
    def step(state, batch):
        return {**state, "w": state["w"] + jdist.all_reduce(batch["x"].sum(0))}, {"rows": state["w"].sum()}

    frozen = {f"frozen{i}": jnp.ones(4) for i in range(5)}
    lowered = jdist.distribute(step, strategy).lower({"w": jnp.ones(8), **frozen}, {"x": jnp.ones((4, 8))})
    assert lowered.as_text().count("is_finite") == 2  # of the old and the new array
