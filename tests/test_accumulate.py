"""Gradient accumulation: microbatches, one all-reduce and one update equal the larger batch."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import jdist
from jdist.errors import BatchError, BoundaryError

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


def gradient_of_a_product(w, batch):
    return jdist.value_and_grad(lambda w: jdist.mean((w * batch["y"]) ** 2))(w)


class TestPerReplicaValuesStayApart:
    def results(self, accumulate, results, **options):
        def step(w, batch):
            loss, grad = gradient_of_a_product(w, batch)
            return w - 0.1 * grad, results(w, batch, loss, grad)

        batch = {"x": BATCH["x"], "y": BATCH["y"]}
        out = jdist.distribute(step, TWO, accumulate=accumulate, **options)(1.0, batch)[1]
        return jax.tree.map(np.asarray, out)

    def test_what_is_of_the_batch_alone_or_of_the_combined_values_alone(self):
        def results(w, batch, loss, grad):
            own = batch["x"].mean()
            return {
                "own": jdist.PerReplica(own),
                "mean of own": own,
                "ratio": grad / loss,
                "distance": (w - 0.1 * grad - loss) ** 2,
                "vector": jdist.PerReplica(grad * jnp.arange(3.0)),
            }

        got, expected = self.results(2, results), self.results(1, results)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected)

    @pytest.mark.parametrize(
        ("result", "kind"),
        [
            (lambda batch: batch["y"][:2], r"float32\[2\]"),
            (lambda batch: batch["y"].argmax(), r"int32\[\]"),
            (lambda batch: batch["y"].mean() > 0, r"int32\[\]"),
            (lambda batch: jdist.replica_id(), r"int32\[\]"),
        ],
        ids=["vector", "integer", "bool", "replica_id"],
    )
    def test_they_are_floating_point_scalars(self, result, kind):
        """Anything else has no mean over microbatches."""
        message = rf"per-replica result .*must be a floating-point scalar; this one is {kind}"
        with pytest.raises(BoundaryError, match=message):
            self.results(2, lambda w, batch, loss, grad: {"own": jdist.PerReplica(result(batch))})
        with pytest.raises(BoundaryError, match=message):
            self.results(2, lambda w, batch, loss, grad: result(batch), returns=("state", "per_replica"))


def test_a_step_without_a_state_accumulates_as_well():
    run = jdist.distribute(lambda batch: gradient_of_a_product(2.0, batch), TWO, args=("batch",), accumulate=4)
    loss, grad = run(BATCH)
    np.testing.assert_allclose(loss, 4 * (BATCH["y"] ** 2).mean(), rtol=1e-5)
    np.testing.assert_allclose(grad, 4 * (BATCH["y"] ** 2).mean(), rtol=1e-5)


CROSSING = {
    "a product of both": lambda own, loss, w, batch: jdist.PerReplica(own * loss),
    "linear in its own": lambda own, loss, w, batch: own / loss,
    "not linear": lambda own, loss, w, batch: (own - loss) ** 2,
    "rows": lambda own, loss, w, batch: (w * batch["x"]).sum(),
    "a condition": lambda own, loss, w, batch: jnp.where(batch["mask"].any(), w, 0),
}


class TestRefused:
    def run(self, step, state, message, error=BoundaryError, **options):
        run = jdist.distribute(step, TWO, **{"accumulate": 2, **options})
        args = [BATCH] if state is None else [state, BATCH]
        with pytest.raises(error, match=message):
            run(*args)

    def test_a_step_without_a_gradient(self):
        self.run(lambda w, b: (w + 1, {}), 1.0, "nowhere")

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

    @pytest.mark.parametrize("kind", CROSSING)
    def test_what_needs_a_single_microbatch_together_with_the_combined_gradients(self, kind):
        def step(w, batch):
            loss, grad = gradient_of_a_product(w, batch)
            w = w - grad
            return w, {"fine": loss, "mixed": CROSSING[kind](batch["x"].mean(), loss, w, batch)}

        with pytest.raises(BoundaryError, match=r"need values of a single microbatch.*\['mixed'\]") as caught:
            jdist.distribute(step, TWO, accumulate=2)(1.0, BATCH)
        assert "fine" not in str(caught.value)
        assert "Compute each from the batch alone" in str(caught.value)

    def test_a_result_that_needs_two_of_them_is_named_once(self):
        def step(w, batch):
            loss, grad = gradient_of_a_product(w, batch)
            return w - grad, {"mixed": jnp.where(loss > batch["x"].max(), loss, batch["x"].min())}

        with pytest.raises(BoundaryError) as caught:
            jdist.distribute(step, TWO, accumulate=2)(1.0, BATCH)
        assert str(caught.value).count("['mixed']") == 1

    def test_a_state_leaf_that_needs_both(self):
        def step(state, batch):
            loss, grad = gradient_of_a_product(state["w"], batch)
            return {"w": state["w"] - grad, "scaled": state["scaled"] + loss * batch["x"].mean()}, {}

        self.run(step, {"w": 1.0, "scaled": 0.0}, r"need values of a single microbatch.*\['scaled'\]")

    def test_neither_state_nor_gradient(self):
        self.run(lambda b: b["y"].sum(), None, "nowhere", args=("batch",))


class TestMetricsThatAreNoMeans:
    batch = {"x": np.arange(16, dtype=np.float32)}  # noqa: RUF012 - never changed

    def run(self, op, accumulate):
        def step(w, batch):
            loss, grad = jdist.value_and_grad(lambda w: jnp.mean(batch["x"] * w))(w)
            return w - 0.0 * grad, {"it": jdist.all_reduce(getattr(jnp, op)(batch["x"]), op), "loss": loss}

        strategy = jdist.mirrored(jax.local_devices()[:2])
        _, metrics = jdist.distribute(step, strategy, accumulate=accumulate)(1.0, self.batch)
        return float(metrics["it"])

    def test_sums_add_up(self):
        assert self.run("sum", 1) == self.run("sum", 4) == 120

    def test_extremes_are_refused(self):
        assert self.run("max", 1) == 15
        with pytest.raises(BoundaryError, match="maximum or minimum"):
            self.run("max", 2)


def test_an_optimiser_with_gradients_of_another_kind_is_refused():
    """It would be called once for each microbatch, silently."""

    def step(state, batch):
        def loss(params):
            return jdist.mean((batch["x"] * params["w"] - 1) ** 2)

        value, grads = jdist.value_and_grad(loss)(state["a"].params)
        other = jdist.all_reduce(jax.grad(loss)(state["b"].params), "mean")
        return {
            "a": state["a"].apply_gradients(grads=grads),
            "b": state["b"].apply_gradients(grads=other),
        }, {"loss": value}

    def create():
        make = jdist.TrainState.create
        return {name: make(params={"w": jnp.ones(())}, tx=optax.sgd(0.1)) for name in ("a", "b")}

    strategy = jdist.mirrored(jax.local_devices()[:2])
    batch = {"x": np.arange(8, dtype=np.float32)}
    state, _ = jdist.distribute(step, strategy)(strategy.init(create), batch)
    assert float(state["a"].params["w"]) == pytest.approx(float(state["b"].params["w"]))
    with pytest.raises(BoundaryError, match=r"did not come from `jdist\.value_and_grad`"):
        jdist.distribute(step, strategy, accumulate=2)(strategy.init(create), batch)


def test_a_print_before_the_gradient_shows_each_microbatch_and_one_after_it_the_whole(capfd):
    def step(w, batch):
        jax.debug.print("rows {}", batch["x"].shape[0] * 10 + batch["x"][0].astype(int))
        grad = jdist.grad(lambda w: jdist.mean(w * batch["x"]))(w)
        jax.debug.print("gradient {}", grad)
        return w - grad, {}

    jdist.distribute(step, jdist.default(), accumulate=2)(0.0, {"x": np.arange(4, dtype=np.float32)})
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "gradient 1.5", "rows 20", "rows 21"]


def test_a_print_of_one_microbatch_with_the_combined_gradient_is_refused():
    def step(w, batch):
        grad = jdist.grad(lambda w: jdist.mean(w * batch["x"]))(w)
        jax.debug.print("{} {}", grad, batch["x"].max())
        return w - grad, {}

    with pytest.raises(BoundaryError, match="a print or callback"):
        jdist.distribute(step, jdist.default(), accumulate=2)(0.0, {"x": np.arange(4, dtype=np.float32)})


def test_what_depends_on_the_replicas_number_alone_is_computed_once():
    """It needs no microbatch, so it may also meet the combined gradients."""

    def step(state, x):
        loss, grad = jdist.value_and_grad(lambda w: jdist.mean(w * x))(state["w"])
        own = 1.0 + jdist.replica_id()
        total = jdist.aggregate(state["total"] + own, "sum", old=state["total"])
        return {"w": state["w"] - grad, "total": total}, {"with the loss": jdist.PerReplica(loss * own)}

    strategy = jdist.mirrored(["cpu:0", "cpu:1"])
    run = jdist.distribute(step, strategy, accumulate=2)
    state, metrics = run({"w": np.float32(1), "total": np.float32(5)}, np.arange(4, dtype=np.float32))
    assert float(state["total"]) == 8.0
    assert [float(x) for x in metrics["with the loss"].local_results()] == [1.5, 3.0]


def test_rows_of_bools_stay_bools():
    def step(w, batch):
        loss, grad = jdist.value_and_grad(lambda w: jdist.mean(w * batch["x"]))(w)
        return w - grad, {"loss": loss}, batch["x"] > 1

    run = jdist.distribute(step, jdist.default(), accumulate=2, returns=("state", "metrics", "examples"))
    _, _, rows = run(0.0, {"x": np.arange(4, dtype=np.float32)})
    assert rows.dtype == bool
    assert rows.tolist() == [False, False, True, True]


def test_a_callback_whose_result_nobody_reads_is_called_once_a_microbatch():
    calls = []

    def log(x):
        calls.append(float(x))
        return np.float32(0)

    def step(w, batch):
        io_callback(log, jax.ShapeDtypeStruct((), jnp.float32), batch["x"].sum())
        grad = jdist.grad(lambda w: jdist.mean(w * batch["x"]))(w)
        return w - grad, {}

    jdist.distribute(step, jdist.default(), accumulate=2)(0.0, {"x": np.arange(4, dtype=np.float32)})
    jax.effects_barrier()
    assert sorted(calls) == [2, 4]


def test_what_would_be_called_twice_or_lost_is_refused():
    batch = {"x": np.arange(4, dtype=np.float32)}

    def rate_from_the_host(w, batch):
        rate = io_callback(lambda: np.float32(0.1), jax.ShapeDtypeStruct((), jnp.float32))
        return w - rate * jdist.grad(lambda w: jdist.mean(w * rate * batch["x"]))(w), {}

    with pytest.raises(BoundaryError, match="what a callback of the step returned"):
        jdist.distribute(rate_from_the_host, jdist.default(), accumulate=2)(0.0, batch)

    def by_reference(w, batch):
        total = jax.new_ref(jnp.float32(0))
        total[...] = jdist.grad(lambda w: jdist.mean(w * batch["x"]))(w)
        return w - total[...], {}

    assert float(jdist.distribute(by_reference, jdist.default())(0.0, batch)[0]) == -1.5
    with pytest.raises(BoundaryError, match=r"jax\.Ref"):
        jdist.distribute(by_reference, jdist.default(), accumulate=2)(0.0, batch)
