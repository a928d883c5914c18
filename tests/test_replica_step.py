"""What one replica computes in one call: results by role, accumulation, the guard against NaN."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.errors import BatchError, BoundaryError, NonFiniteError, StepError

TWO = jdist.mirrored(["cpu:0", "cpu:1"])
EVERY = {
    "default": jdist.default(),
    "shard_map": TWO,
    "pmap": jdist.mirrored(["cpu:0", "cpu:1"], transform="pmap"),
    "jit": jdist.mirrored(["cpu:0", "cpu:1"], transform="jit"),
}
rng = np.random.default_rng(0)
# 16 rows, 4 a microbatch under accumulate=4; the last 6 are padding, so that whole microbatches of a replica are.
BATCH = {
    "x": rng.normal(size=(16, 3)).astype(np.float32),
    "y": rng.normal(size=16).astype(np.float32),
    "mask": np.arange(16) < 10,
}
tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))


def norm(tree):
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))


def create(dtype=jnp.float32):
    params = {"w": jnp.array([1.0, -2.0, 0.5], dtype), "b": jnp.zeros((), dtype)}
    ema = jax.tree.map(jnp.copy, params)
    return jdist.TrainState.create(
        params=params, tx=tx, ema=ema, rows_seen=jnp.int32(0), real_seen=jnp.int32(0), rng=jax.random.key(0)
    )


def losses_of(params, batch):
    return (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2


def train(state, batch):
    """Clips and logs the gradient itself; counts; averages the new parameters."""
    rng, _ = jax.random.split(state.rng)
    loss, grads = jdist.value_and_grad(lambda p: jdist.mean(losses_of(p, batch), batch["mask"]))(state.params)
    new = state.apply_gradients(grads=grads)
    new = new.replace(
        rng=rng,
        ema=jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, state.extra["ema"], new.params),
        rows_seen=state.extra["rows_seen"] + batch["x"].shape[0],
        real_seen=state.extra["real_seen"] + jdist.mean(batch["mask"].astype(jnp.int32) * 16).astype(jnp.int32) * 0,
    )
    metrics = {
        "loss": loss,
        "grad_norm": norm(grads),
        "clipped_norm": norm(jax.tree.map(lambda a, b: a - b, state.params, new.params)),
        "mae": jdist.mean(jnp.abs(batch["y"]), batch["mask"]),
        "step": state.step,
    }
    return new, metrics


def numbers(tree):
    def number(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return jax.tree.map(lambda x: np.asarray(number(x)).astype(np.float64), tree)


@pytest.fixture(scope="module")
def expected():
    state, metrics = create(), None
    for _ in range(3):
        state, metrics = jax.jit(train)(state, BATCH)
    return numbers(state), numbers(metrics)


@pytest.mark.parametrize(
    ("name", "accumulate"), [("default", 4), ("shard_map", 1), ("shard_map", 4), ("pmap", 2), ("jit", 4)]
)
def test_accumulation_equals_the_larger_batch(name, accumulate, expected):
    """Clip, norm, counters, keys and an average of the new parameters; microbatches that are all padding."""
    step = jdist.distribute(train, EVERY[name], accumulate=accumulate)
    state = create()
    for _ in range(3):
        state, metrics = step(state, BATCH)
    state, metrics = numbers(state), numbers(metrics)
    replicas = EVERY[name].num_replicas if name != "jit" else 1
    assert state.extra.pop("rows_seen") == 3 * 16 / replicas
    assert state.step == 3
    rest = expected[0].replace(extra={k: v for k, v in expected[0].extra.items() if k != "rows_seen"})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), state, rest)
    for key, value in expected[1].items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-5, err_msg=key)
    assert metrics["clipped_norm"] == pytest.approx(0.05, rel=1e-4)  # once, on the whole gradient


def test_rows_that_count_are_counted_by_every_microbatch():
    def step(state, batch):
        _, grad = jdist.value_and_grad(lambda w: jdist.mean(w * batch["y"], batch["mask"]))(state["w"])
        seen = state["seen"] + jdist.all_reduce(batch["mask"].sum(), "sum")
        return {"w": state["w"] - grad, "seen": seen}, {}

    run = jdist.distribute(step, TWO, accumulate=4, check_replicas=1)
    state, _ = run({"w": 1.0, "seen": 0}, BATCH)
    state, _ = run(state, BATCH)
    assert int(state["seen"]) == 20
    np.testing.assert_allclose(state["w"], 1 - 2 * BATCH["y"][:10].mean(), rtol=1e-6)


@pytest.mark.parametrize("name", ["shard_map", "jit"])
def test_accumulate_and_steps_per_call_together(name, expected):
    step = jdist.distribute(train, EVERY[name], accumulate=2, steps_per_call=3)
    state, metrics = step(create(), jax.tree.map(lambda x: np.stack([x] * 3), BATCH))
    np.testing.assert_allclose(numbers(state).params["w"], expected[0].params["w"], rtol=1e-5)
    assert metrics["step"].tolist() == [0, 1, 2]
    np.testing.assert_allclose(metrics["loss"][-1], expected[1]["loss"], rtol=1e-5)


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"steps_per_call": 2}, {"accumulate": 2, "steps_per_call": 2}])
def test_convolutions_whose_loops_are_unrolled_on_cpu(options):
    def step(w, batch):
        def loss_fn(w):
            out = jax.lax.conv(batch["x"], w, (1, 1), "VALID")
            return jdist.mean((out**2).sum((1, 2, 3)), batch["mask"])

        loss, grad = jdist.value_and_grad(loss_fn)(w)
        return w - 0.01 * grad, {"loss": loss}

    x = rng.normal(size=(8, 1, 4, 4)).astype(np.float32)
    batch = {"x": x, "mask": np.arange(8) < 5, "more": np.ones(8)}
    expected = jnp.ones((1, 1, 2, 2))
    for _ in range(options.get("steps_per_call", 1)):
        expected, metrics = jax.jit(step)(expected, batch)
    if "steps_per_call" in options:
        batch = jax.tree.map(lambda x: np.stack([x, x]), batch)
    run = jdist.distribute(step, TWO, **options)
    state, got = run(jnp.ones((1, 1, 2, 2)), batch)
    np.testing.assert_allclose(state, expected, rtol=1e-5)
    np.testing.assert_allclose(np.ravel(got["loss"])[-1], metrics["loss"], rtol=1e-5)


def loops(text):
    """The bodies of a StableHLO module's while loops, with the functions that they call."""
    functions = {m[1]: block(text, m.end() - 1) for m in re.finditer(r"func\.func (?:\w+ )?@([\w.]+).*?{\n", text)}
    bodies = [block(text, m.end() - 1) for m in re.finditer(r"\bdo {", text)]
    assert len(bodies) == text.count("stablehlo.while")
    return [body + "".join(functions[name] for name in re.findall(r"call @([\w.]+)", body)) for body in bodies]


def block(text, start):
    """The text between the brace at or after `start` and its partner."""
    start = text.rindex("{", 0, start + 1)
    depth = 0
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start : end + 1]
    raise AssertionError("no closing brace")


@pytest.mark.parametrize("masked", [False, True])
def test_there_is_one_all_reduce_after_the_scan_and_none_inside(masked):
    def step(state, batch):
        mask = batch["mask"] if masked else None
        loss, grads = jdist.value_and_grad(lambda p: jdist.mean(losses_of(p, batch), mask))(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "mae": jnp.abs(batch["y"]).mean()}

    text = jdist.distribute(step, TWO, accumulate=4).lower(create(), BATCH).as_text()
    assert text.count("stablehlo.while") == 1 + masked
    assert all("all_reduce" not in body for body in loops(text))
    # loss, two gradients and a metric reduced side by side, nothing between them; before, the number of rows
    reduces = [m.start() for m in re.finditer(r'"?stablehlo\.all_reduce', text)]
    last_loop = text.rindex("stablehlo.while")
    assert sum(place < last_loop for place in reduces) == masked
    after = text[reduces[masked] : reduces[-1]]
    assert not re.findall(r"stablehlo\.(?:dot_general|multiply|divide|subtract)", after)


def test_sum_and_half_precision_and_rows():
    def step(state, batch):
        def loss_fn(p):
            return losses_of(p, batch).sum() / 16, batch["x"][:, 0] * p["w"][0]

        (loss, rows), grads = jdist.value_and_grad(loss_fn, has_aux=True, op="sum")(state.params)
        assert grads["w"].dtype == jnp.bfloat16
        return state.apply_gradients(grads=grads), {"loss": loss, "norm": norm(grads)}, {"rows": rows, "y": batch["y"]}

    run = jdist.distribute(step, TWO, accumulate=4, returns=("state", "metrics", "examples"))
    batch = {"x": BATCH["x"], "y": BATCH["y"]}
    state, metrics, rows = run(create(jnp.bfloat16), batch)
    assert state.params["w"].dtype == jnp.bfloat16
    assert rows["y"].tolist() == BATCH["y"].tolist()  # in input order
    np.testing.assert_allclose(rows["rows"], BATCH["x"][:, 0], rtol=1e-2)
    full = jax.value_and_grad(lambda p: losses_of(p, batch).mean())(create().params)
    np.testing.assert_allclose(metrics["loss"], full[0], rtol=2e-2)
    np.testing.assert_allclose(metrics["norm"], norm(full[1]), rtol=2e-2)


def test_small_half_precision_gradients_are_added_up_in_float32():
    def step(w, batch):
        return w - jdist.grad(lambda w: (w * batch["x"].astype(jnp.bfloat16)).sum(), op="sum")(w), {}

    # 256 + 1 + ... + 1: in bfloat16 every one of the ones would be lost
    x = np.concatenate([[256.0], np.ones(63)]).astype(np.float32)
    w, _ = jdist.distribute(step, jdist.default(), accumulate=64)(jnp.bfloat16(0), {"x": x})
    assert float(w) == float(-jnp.bfloat16(256 + 63))


class TestAccumulateKeepsPerReplicaValuesApart:
    def metrics(self, accumulate):
        def step(w, batch):
            loss, grad = jdist.value_and_grad(lambda w: jdist.mean((w * batch["y"]) ** 2))(w)
            own = batch["x"].mean()
            return w - grad, {
                "own": jdist.PerReplica(own),
                "product": jdist.PerReplica(own * loss),
                "distance": (own - loss) ** 2,
                "ratio": own / loss,
            }

        out = jdist.distribute(step, TWO, accumulate=accumulate)(1.0, {"x": BATCH["x"], "y": BATCH["y"]})[1]
        return jax.tree.map(np.asarray, out)

    @pytest.mark.parametrize("name", ["own", "ratio"])
    def test_what_is_linear_in_the_replicas_own(self, name):
        got, expected = self.metrics(2)[name], self.metrics(1)[name]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected)

    @pytest.mark.xfail(
        strict=True, reason="BUG: what a PerReplica value shares with the update part is averaged, silently"
    )
    def test_own_times_combined(self):
        np.testing.assert_allclose(self.metrics(2)["product"].value, self.metrics(1)["product"].value, rtol=1e-5)

    @pytest.mark.xfail(
        strict=True, reason="BUG: a metric that is not linear in a microbatch's value is computed of its mean, silently"
    )
    def test_not_linear(self):
        np.testing.assert_allclose(self.metrics(2)["distance"], self.metrics(1)["distance"], rtol=1e-5)


class TestAccumulateRefuses:
    def run(self, step, state, message, error=BoundaryError, **options):
        with pytest.raises(error, match=message):
            jdist.distribute(step, TWO, **{"accumulate": 2, **options})(state, BATCH)

    def test_a_step_without_a_gradient(self):
        self.run(lambda w, b: (w + 1, {}), 1.0, "nowhere")

    def test_no_state(self):
        run = jdist.distribute(lambda b: b["y"].sum(), TWO, accumulate=2, args=("batch",))
        with pytest.raises(BoundaryError, match='needs a step with a "state"'):
            run(BATCH)

    def test_an_array_of_a_microbatch_that_is_needed_after_the_update(self):
        def step(w, batch):
            w = w - jdist.grad(lambda w: (w * batch["y"]).mean())(w)
            return w, {"new": (w * batch["x"]).sum()}

        self.run(step, 1.0, r"\['new'\] needs, after the update, a value of one microbatch of type float32\[4, 3\]")

    def test_a_condition_of_a_microbatch(self):
        def step(w, batch):
            w = w - jdist.grad(lambda w: (w * batch["y"]).mean())(w)
            return w, {"new": jnp.where(batch["mask"].any(), w, 0)}

        self.run(step, 1.0, r"\['new'\] needs.*bool\[\]; only floating-point scalars")

    def test_rows_that_do_not_divide(self):
        self.run(
            train, create(), r"16 rows does not divide by 6 \(2 replicas x accumulate=3\)", BatchError, accumulate=3
        )

    def test_another_computation_for_another_number_of_rows(self):
        def step(w, batch):
            loss, grad = jdist.value_and_grad(lambda w: (w * batch["y"]).mean())(w)
            more = jdist.grad(lambda w: (w * batch["y"]).mean())(w) if len(batch["y"]) > 4 else 0.0
            return w - grad - more, {"loss": loss}

        self.run(step, 1.0, "different things for different numbers of rows")


class TestResults:
    @property
    def batch(self):
        return {"y": np.arange(4, dtype=np.float32), "z": np.ones(4)}

    def test_the_state_alone(self):
        for state in (1.0, {"w": 1.0}, (1.0, 2.0)):
            new = jdist.distribute(lambda s, b: jax.tree.map(lambda w: w + 1, s), TWO)(state, self.batch)
            assert jax.tree.structure(new) == jax.tree.structure(state)
            assert float(jax.tree.leaves(new)[0]) == 2.0

    def test_metrics_are_any_tree_and_averaged_once(self):
        def step(s, b):
            loss, _ = jdist.value_and_grad(lambda w: (w * b["y"]).sum())(s)
            return s, (loss, [b["y"].sum(), jdist.all_reduce(b["y"].sum(), "sum"), 3, True, None, b["y"] > 1])

        loss, (total, summed, three, true, none, array) = jdist.distribute(step, TWO)(1.0, self.batch)[1]
        assert (float(loss), float(total), float(summed)) == (3.0, 3.0, 6.0)
        assert (float(three), float(true), none) == (3.0, 1.0, None)
        assert array.tolist() == [0.5, 0.5]

    @pytest.mark.parametrize(
        ("result", "message"),
        [
            (lambda s: (s, {}, {}), r"(?s)returned a state of another tree"),
            (lambda s: {"w": s["w"]}, r"(?s)another tree.*\['n'\]: gone"),
            (lambda s: None, r"(?s)another tree.*\['n'\]: gone.*\['w'\]: gone"),
            (lambda s: ({"w": s["w"]}, {}), r"(?s)another tree.*\['n'\]: gone"),
            (lambda s: ({**s, "w": s["w"][:1]}, {}), r"\['w'\]: float32\[2\] before, float32\[1\] after"),
            pytest.param(
                lambda s: ({**s, "n": s["n"] + 0.5}, {}),
                r"\['n'\]: int32\[\] before, float32\[\] after",
                marks=pytest.mark.xfail(strict=True, reason="BUG: a weakly typed float is cut to an integer, silently"),
            ),
            (lambda s: ({**s, "w": s["w"].astype(jnp.bfloat16)}, {}), r"float32\[2\] before, bfloat16\[2\] after"),
        ],
    )
    def test_another_state_than_came_in(self, result, message):
        with pytest.raises(StepError, match=message):
            jdist.distribute(lambda s, b: result(s), TWO)({"w": jnp.ones(2), "n": 0}, self.batch)

    def test_another_number_of_results_than_declared(self):
        run = jdist.distribute(lambda s, b: (s, {}), TWO, returns=("state", "metrics", "examples"))
        with pytest.raises(
            StepError, match=r"returned a tuple of 2, but `returns` is \('state', 'metrics', 'examples'\)"
        ):
            run(1.0, self.batch)
        run = jdist.distribute(lambda s, b: {}, TWO, returns=("metrics", "examples"))
        with pytest.raises(StepError, match=r"returned a dict, but"):
            run(1.0, self.batch)

    def test_examples_without_rows(self):
        with pytest.raises(StepError, match="examples"):
            jdist.distribute(lambda s, b: b["y"].sum(), TWO, returns="examples")(1.0, self.batch)

    @pytest.mark.xfail(strict=True, reason="BUG: ValueError: scan got no values to scan over")
    def test_steps_per_call_without_a_batch(self):
        run = jdist.distribute(lambda s: (s + 1, {}), TWO, args=("state",), steps_per_call=2)
        try:
            assert float(run(1.0)[0]) == 3.0
        except StepError as refused:  # or refused by name
            assert "steps_per_call" in str(refused)  # noqa: PT017


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
