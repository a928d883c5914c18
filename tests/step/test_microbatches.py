"""Gradient accumulation: microbatches, one all-reduce and one update equal the larger batch."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import jdist
from jdist.errors import BoundaryError
from tests.toys import TRANSFORMS, TWO, masked_batch, numbers

FOUR = jdist.mirrored([f"cpu:{i}" for i in range(4)])
EVERY = {"default": jdist.default(), **TRANSFORMS}
BATCH = masked_batch()  # 4 rows a microbatch under accumulate=4
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
    assert state.extra.pop("rows_seen") == 3 * 16 / (replicas * accumulate)  # each microbatch is a replica
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
    # Each collective is a function of its own name. Before the last loop the number of rows; after it loss, two gradients and a
    # metric side by side, with nothing between them.
    functions = {m[1]: block(text, m.end() - 1) for m in re.finditer(r"func\.func (?:\w+ )?@([\w.]+).*?{\n", text)}
    (body,) = [body for body in functions.values() if "stablehlo.while" in body and "call @jdist_" in body]
    calls = [(m.start(), functions[m[1]]) for m in re.finditer(r"call @(jdist_\w+)", body)]
    last_loop = body.rindex("stablehlo.while")
    before, after = ([f for place, f in calls if (place < last_loop) == early] for early in (True, False))
    assert [f.count("stablehlo.all_reduce") for f in before] == [1] * masked
    assert [f.count("stablehlo.all_reduce") for f in after] == [4]
    assert text.count("stablehlo.all_reduce") == 4 + masked
    assert not re.findall(r"stablehlo\.(?:dot_general|multiply|divide|subtract)", after[0])


def test_sum_and_half_precision_and_rows():
    def step(state, batch):
        def loss_fn(p):
            return losses_of(p, batch).sum() / 16, batch["x"][:, 0] * p["w"][0]

        (loss, rows), grads = jdist.value_and_grad(loss_fn, has_aux=True, op="sum")(state.params)
        assert grads["w"].dtype == jnp.bfloat16
        return (
            state.apply_gradients(grads=grads),
            {"loss": loss, "norm": norm(grads)},
            {
                "rows": rows,
                "y": batch["y"],
                "above": batch["y"] > 1,
            },
        )

    run = jdist.distribute(step, TWO, accumulate=4, returns=("state", "metrics", "examples"))
    batch = {"x": BATCH["x"], "y": BATCH["y"]}
    state, metrics, rows = run(create(jnp.bfloat16), batch)
    assert state.params["w"].dtype == jnp.bfloat16
    assert rows["y"].tolist() == BATCH["y"].tolist()  # in input order
    assert rows["above"].dtype == bool
    assert rows["above"].tolist() == (BATCH["y"] > 1).tolist()
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
    def results(self, accumulate, results, strategy=TWO, **options):
        def step(w, batch):
            loss, grad = gradient_of_a_product(w, batch)
            return w - 0.1 * grad, results(w, batch, loss, grad)

        batch = {"x": BATCH["x"], "y": BATCH["y"]}
        out = jdist.distribute(step, strategy, accumulate=accumulate, **options)(1.0, batch)[1]
        return jax.tree.map(np.asarray, out)

    @pytest.mark.parametrize(
        "result",
        [
            lambda batch, loss: batch["x"].mean(),
            lambda batch, loss: loss * jnp.arange(3.0),
            lambda batch, loss: batch["y"][:2],
            lambda batch, loss: batch["y"].argmax(),
            lambda batch, loss: batch["y"].mean() > loss,
            lambda batch, loss: jdist.replica_id(),
        ],
        ids=["scalar", "of combined values", "vector", "integer", "bool of both", "replica_id"],
    )
    def test_they_are_those_of_as_many_replicas(self, result):
        def results(w, batch, loss, grad):
            return {"own": jdist.PerReplica(result(batch, loss)), "ratio": grad / loss}

        got, expected = self.results(2, results), self.results(1, results, strategy=FOUR)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected)
        role = {"returns": ("state", "per_replica")}
        got = self.results(2, lambda w, batch, loss, grad: result(batch, loss), **role)
        np.testing.assert_allclose(got.value, expected["own"].value, rtol=1e-5)


def test_what_microbatches_hold_apart_is_reduced_and_gathered():
    def step(w, batch):
        _, grad = gradient_of_a_product(w, batch)
        return w - grad, {"sum": jdist.PerReplica(batch["y"].sum()), "rows": jdist.PerReplica(batch["y"])}

    _, metrics = jdist.distribute(step, TWO, accumulate=4)(1.0, {"x": BATCH["x"], "y": BATCH["y"]})
    sums = BATCH["y"].reshape(8, 2).sum(1)
    np.testing.assert_allclose(TWO.local_results(metrics["sum"]), sums, rtol=1e-6)
    np.testing.assert_allclose(TWO.reduce("sum", metrics["sum"]), BATCH["y"].sum(), rtol=1e-5)
    assert TWO.gather(metrics["rows"], axis=0).tolist() == BATCH["y"].tolist()


def test_a_step_without_a_state_accumulates_as_well():
    def step(batch):
        return *gradient_of_a_product(2.0, batch), batch["y"].sum()

    loss, grad, mean_of_sums = jdist.distribute(step, TWO, args=("batch",), returns=("metrics",) * 3, accumulate=4)(
        BATCH
    )
    np.testing.assert_allclose(mean_of_sums, BATCH["y"].sum() / 8, rtol=1e-5)
    np.testing.assert_allclose(loss, 4 * (BATCH["y"] ** 2).mean(), rtol=1e-5)
    np.testing.assert_allclose(grad, 4 * (BATCH["y"] ** 2).mean(), rtol=1e-5)


def without_a_gradient(w, batch):
    return w + 1, {"mean": batch["y"].mean()}


def another_computation_for_another_number_of_rows(w, batch):
    loss, grad = jdist.value_and_grad(lambda w: (w * batch["y"]).mean())(w)
    more = jdist.grad(lambda w: (w * batch["y"]).mean())(w) if len(batch["y"]) > 4 else 0.0
    return w - grad - more, {"loss": loss}


def mixed(mix):
    """A step that puts what is of one microbatch and what is of all of them into one metric."""

    def step(w, batch):
        loss, grad = gradient_of_a_product(w, batch)
        w = w - grad
        return w, {"loss": loss, "mixed": mix(batch["x"].mean(), loss, w, batch)}

    return step


STEPS = {
    "no gradient": without_a_gradient,
    "looks at its rows' number": another_computation_for_another_number_of_rows,
    "a product of both": mixed(lambda own, loss, w, batch: jdist.PerReplica(own * loss)),
    "linear in its own": mixed(lambda own, loss, w, batch: own / loss),
    "not linear": mixed(lambda own, loss, w, batch: (own - loss) ** 2),
    "rows": mixed(lambda own, loss, w, batch: (w * batch["x"]).sum()),
    "a condition": mixed(lambda own, loss, w, batch: jnp.where(batch["mask"].any(), w, 0)),
    "two conditions": mixed(lambda own, loss, w, batch: jnp.where(loss > batch["x"].max(), loss, batch["x"].min())),
}


@pytest.mark.parametrize("name", STEPS)
def test_it_is_the_step_on_more_replicas(name):
    found, expected = [
        jdist.distribute(STEPS[name], strategy, accumulate=k)(1.0, BATCH) for strategy, k in ((TWO, 2), (FOUR, 1))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


def test_neither_state_nor_gradient():
    def total(batch):
        return {"mean of sums": batch["y"].sum()}

    found, expected = [
        jdist.distribute(total, strategy, accumulate=k, args=("batch",))(BATCH) for strategy, k in ((TWO, 2), (FOUR, 1))
    ]
    np.testing.assert_allclose(found["mean of sums"], expected["mean of sums"], rtol=1e-6)


def guarded(batch):
    return (batch["y"] * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1)


def kinds(batch):
    return (batch["y"] > 0).astype(jnp.int32) + (batch["y"] > 1)


MEANS = {
    "variance": lambda old, batch: 0.9 * old + 0.1 * batch["y"].var(),
    "unbiased": lambda old, batch: 0.9 * old + 0.1 * batch["y"].var(ddof=1),
    "of two means": lambda old, batch: 0.9 * old + 0.1 * jnp.sqrt((batch["y"] ** 2).mean() + batch["x"].mean() ** 2),
    "of a matrix": lambda old, batch: 0.9 * old + 0.1 * batch["x"].sum() / len(batch["x"]),
    "by the inverse": lambda old, batch: 0.9 * old + 0.1 * batch["y"].sum() * (1 / len(batch["y"])),
    "product": lambda old, batch: 0.9 * old + 0.1 * jnp.dot(batch["y"], batch["mask"]) / len(batch["y"]),
    "of rows that count": lambda old, batch: 0.9 * old + 0.1 * guarded(batch),
    "overwritten": lambda old, batch: jnp.concatenate([batch["x"].mean(0), batch["x"].mean(0)])[0],
}
NO_MEANS = {
    "sum": lambda old, batch: 0.9 * old + 0.1 * batch["y"].sum(),
    "count": lambda old, batch: 0.9 * old + 0.1 * batch["mask"].sum(),
    "scaled sum": lambda old, batch: 0.9 * old + batch["y"].sum() / 1000,
    "maximum": lambda old, batch: 0.9 * old + 0.1 * batch["y"].max(),
    "computed slope": lambda old, batch: jnp.where(batch["y"].sum() > 3, 0.9, 1.0) * old + 0.1 * batch["y"].mean(),
    "last maximum": lambda old, batch: batch["y"].max(),
    "last row": lambda old, batch: batch["y"][-1],
    "product of sums": lambda old, batch: 0.9 * old + 0.1 * batch["y"].sum() * batch["mask"].mean(),
}
NO_COUNTS = {
    "argmax": lambda batch: batch["y"].argmax(),
    "any": lambda batch: batch["mask"].any(),
    "maximum": lambda batch: batch["mask"].max(),
    "last": lambda batch: batch["mask"][-1],
    "enough": lambda batch: batch["mask"].sum() > 2,
}
COUNTS = {
    "histogram": lambda old, batch: jnp.asarray(old).at[kinds(batch)].add(1),
    "bincount": lambda old, batch: old + jnp.bincount(kinds(batch), length=3),
    "one-hot": lambda old, batch: old + jax.nn.one_hot(kinds(batch), 3).sum(0),
    "product": lambda old, batch: old + jax.nn.one_hot(kinds(batch), 3).T @ jnp.ones(len(batch["y"])),
}


class TestStateThatMicrobatchesWrite:
    """Without a collective: each reads the old value, a counter counts all of them, an average takes the mean of theirs."""

    def written(self, rule, first=4.0):
        def step(state, batch):
            loss, grad = gradient_of_a_product(state["w"], batch)
            return {"w": state["w"] - grad, "own": rule(state["own"], batch, loss)}, {
                "own": state["own"] + 0,
                "loss": loss,
            }

        state, metrics = jdist.distribute(step, jdist.one_device(), accumulate=4)({"w": 1.0, "own": first}, BATCH)
        return np.asarray(state["own"]), metrics

    def test_a_counter(self):
        own, metrics = self.written(lambda old, batch, loss: old + batch["mask"].sum(), 4)
        assert own == 4 + 10
        assert metrics["own"] == 4

    def test_whole_numbers_in_floating_point(self):
        own, _ = self.written(lambda old, batch, loss: old - 2 * batch["mask"].astype(jnp.float32).sum())
        assert own == 4 - 2 * 10

    def test_what_may_be_a_sum_or_a_mean_is_refused_until_it_is_said(self):
        for added in (lambda batch: batch["y"].mean(), lambda batch: batch["y"].sum()):
            with pytest.raises(
                BoundaryError, match=r"adds to state leaf \['own'\].*`jdist\.aggregate\(new, \"sum\", old=old\)`"
            ):
                self.written(lambda old, batch, loss: old + loss * added(batch))  # noqa: B023
        own, metrics = self.written(
            lambda old, batch, loss: jdist.aggregate(old + loss * batch["y"].sum(), "sum", old=old)
        )
        np.testing.assert_allclose(own, 4 + metrics["loss"] * BATCH["y"].sum(), rtol=1e-5)
        own, metrics = self.written(lambda old, batch, loss: jdist.aggregate(old + loss * batch["y"].mean(), "mean"))
        np.testing.assert_allclose(own, 4 + metrics["loss"] * BATCH["y"].mean(), rtol=1e-5)

    @pytest.mark.parametrize("around", [lambda x: x, jax.lax.stop_gradient])  # the second is what nnx.BatchNorm does
    def test_a_moving_average(self, around):
        own, _ = self.written(lambda old, batch, loss: around(0.9 * old + 0.1 * batch["y"].mean()))
        np.testing.assert_allclose(own, 0.9 * 4 + 0.1 * BATCH["y"].mean(), rtol=1e-5)

    def test_what_is_overwritten(self):
        own, _ = self.written(lambda old, batch, loss: batch["y"].mean())
        np.testing.assert_allclose(own, BATCH["y"].mean(), rtol=1e-5)

    @pytest.mark.parametrize("rule", MEANS.values(), ids=MEANS)
    def test_what_the_program_shows_to_be_a_mean(self, rule):
        def of(rows):
            return rule(4.0, {name: x[rows] for name, x in BATCH.items()})

        own, _ = self.written(lambda old, batch, loss: rule(old, batch), 4.0)
        expected = np.mean([of(slice(i, i + 4)) for i in range(0, 16, 4)])
        np.testing.assert_allclose(own, expected, rtol=1e-5)

    @pytest.mark.parametrize("rule", NO_MEANS.values(), ids=NO_MEANS)
    @pytest.mark.parametrize("strategy", [jdist.one_device(), jdist.mirrored(["cpu:0", "cpu:1"], transform="jit"), TWO])
    def test_what_it_does_not_is_refused_until_it_is_said(self, rule, strategy):
        step = lambda own, batch: (rule(own, batch), {})  # noqa: E731
        with pytest.raises(BoundaryError, match=r"averages into.*does not show.*`jdist\.all_reduce\(x, \"sum\"\)`"):
            jdist.distribute(step, strategy, accumulate=2)(4.0, BATCH)

    def test_a_mean_of_jdists_over_the_rows_that_count(self):
        own, _ = self.written(lambda old, batch, loss: 0.9 * old + 0.1 * jdist.mean(batch["y"], batch["mask"]))
        np.testing.assert_allclose(own, 0.9 * 4 + 0.1 * BATCH["y"][:10].mean(), rtol=1e-5)

    @pytest.mark.parametrize("added", NO_COUNTS.values(), ids=NO_COUNTS)
    def test_a_whole_number_that_is_no_sum_over_rows_is_refused(self, added):
        with pytest.raises(BoundaryError, match=r"adds to state leaf \['own'\]"):
            self.written(lambda old, batch, loss: old + added(batch).astype(jnp.int32), 4)

    @pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
    def test_counts_of_every_making(self, count):
        own, _ = self.written(lambda old, batch, loss: count(old, batch), jnp.zeros(3))
        np.testing.assert_array_equal(own, count(jnp.zeros(3), BATCH))

    def test_a_maximum_is_refused(self):
        with pytest.raises(BoundaryError, match=r"computes state leaf \['own'\].*`jdist\.all_reduce\(x, \"max\"\)`"):
            self.written(lambda old, batch, loss: jnp.maximum(old, batch["y"].max()))
        own, _ = self.written(
            lambda old, batch, loss: jnp.maximum(old, jdist.all_reduce(batch["y"].max(), "max")), -9.0
        )
        np.testing.assert_allclose(own, BATCH["y"].max())


def test_a_print_shows_each_microbatch_unless_all_it_shows_is_combined(capfd):
    def step(w, batch):
        jax.debug.print("rows {}", batch["x"].shape[0] * 10 + batch["x"][0].astype(int))
        grad = jdist.grad(lambda w: jdist.mean(w * batch["x"]))(w)
        jax.debug.print("gradient {}", grad)
        jax.debug.print("{} {}", grad, batch["x"].max())
        return w - grad, {}

    jdist.distribute(step, jdist.default(), accumulate=2)(0.0, {"x": np.arange(4, dtype=np.float32)})
    jax.effects_barrier()
    printed = sorted(capfd.readouterr().out.splitlines())
    assert printed == ["1.5 1.0", "1.5 3.0", "gradient 1.5", "rows 20", "rows 22"]


def test_the_replicas_number_counts_microbatches():

    def step(state, x):
        loss, grad = jdist.value_and_grad(lambda w: jdist.mean(w * x))(state["w"])
        own = 1.0 + jdist.replica_id()
        total = jdist.aggregate(state["total"] + own, "sum", old=state["total"])
        return {"w": state["w"] - grad, "total": total}, {"with the loss": jdist.PerReplica(loss * own)}

    strategy = jdist.mirrored(["cpu:0", "cpu:1"])
    run = jdist.distribute(step, strategy, accumulate=2)
    state, metrics = run({"w": np.float32(1), "total": np.float32(5)}, np.arange(4, dtype=np.float32))
    assert float(state["total"]) == 5 + 1 + 2 + 3 + 4
    assert [float(x) for x in metrics["with the loss"].local_results()] == [1.5, 3.0, 4.5, 6.0]


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
    assert sorted(calls) == [1, 5]


def test_what_would_be_called_twice_or_lost_is_refused():
    batch = {"x": np.arange(4, dtype=np.float32)}

    def rate_from_the_host(w, batch):
        rate = io_callback(lambda: np.float32(0.1), jax.ShapeDtypeStruct((), jnp.float32))
        return w - rate * jdist.grad(lambda w: jdist.mean(w * rate * batch["x"]))(w), {}

    with pytest.raises(BoundaryError, match="the result of a callback is needed"):
        jdist.distribute(rate_from_the_host, jdist.default(), accumulate=2)(0.0, batch)

    def by_reference(w, batch):
        total = jax.new_ref(jnp.float32(0))
        total[...] = jdist.grad(lambda w: jdist.mean(w * batch["x"]))(w)
        return w - total[...], {}

    assert float(jdist.distribute(by_reference, jdist.default())(0.0, batch)[0]) == -1.5
    with pytest.raises(BoundaryError, match=r"jax\.Ref"):
        jdist.distribute(by_reference, jdist.default(), accumulate=2)(0.0, batch)
