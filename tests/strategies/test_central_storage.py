"""One copy of the state in host memory: what a step gives, where things are, what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.core.sharded_leaf import ShardedLeaf
from jdist.errors import DonatedStateError, NonFiniteError, ReplicaDivergenceError, StepError
from tests.by_default import some
from tests.toys import assert_close

DEVICES = jax.devices()[:4]
RNG = np.random.default_rng(0)
ROWS = 8
BATCHES = [
    {"x": RNG.normal(size=(ROWS, 63)).astype(np.float32), "y": RNG.normal(size=(ROWS, 3)).astype(np.float32)}
    for _ in range(6)
]


@pytest.fixture(scope="module")
def strategy():
    return jdist.central_storage(DEVICES)


def create(tx: Any, **extra: Any) -> jdist.TrainState:
    """Parameters of which one is stored in rows, one in a row of elements, and one, with 3 elements, whole."""
    k1, k2 = jax.random.split(jax.random.key(0))
    params = {
        "rows": jax.random.normal(k1, (63, 256)) * 0.1,
        "flat": jax.random.normal(k2, (256, 3)) * 0.1,
        "small": jnp.zeros(3),
    }
    return jdist.TrainState.create(params=params, tx=tx, rng=jax.random.key(1), **extra)


def predict(params, x):
    return jnp.tanh(x @ params["rows"]) @ params["flat"] + params["small"]


def train_step(state, batch):
    loss, grads = jdist.value_and_grad(lambda p: jnp.mean((predict(p, batch["x"]) - batch["y"]) ** 2))(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "norm": optax.tree.norm(grads)}


def run(strategy, step, make, batches=BATCHES, **options):
    distributed = jdist.distribute(step, strategy, **options)
    state = strategy.init(make)
    for batch in batches:
        state, metrics = distributed(state, batch)
    return strategy.fetch(state), jax.tree.map(np.asarray, metrics)


def is_close(got, want, atol=2e-6):
    assert_close(got, want, rtol=1e-5, atol=atol)


OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "clipped_adamw": optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(optax.cosine_decay_schedule(1e-2, 10))),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "multi_steps": optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, key=3), optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", some(OPTIMIZERS, ["sgd", "clipped_adamw", "lamb", "noise"]))
def test_equals_one_device(strategy, name):
    tx = OPTIMIZERS[name]
    # Adam divides by the size of the gradient, which makes more of the rounding.
    got, want = (run(s, train_step, lambda: create(tx)) for s in (strategy, jdist.one_device()))
    is_close(got, want, atol=2e-6 if "sgd" in name or "multi" in name else 2e-5)
    assert int(got[0].step) == len(BATCHES)


class TestWhereThingsAre:
    def test_one_copy_in_host_memory_a_part_with_each_replica(self, strategy):
        state = strategy.init(lambda: create(optax.adam(1e-3)))
        state, _ = jdist.distribute(train_step, strategy)(state, BATCHES[0])
        shapes = jax.eval_shape(lambda: create(optax.adam(1e-3)))
        leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, ShardedLeaf))
        for leaf, shape in zip(leaves, jax.tree.leaves(shapes), strict=True):
            assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
            if not isinstance(leaf, ShardedLeaf):
                assert leaf.ndim == 0 or leaf.shape == (3,)
                assert leaf.sharding == strategy.replicated_sharding
                continue
            assert leaf.stored.sharding.memory_kind == "pinned_host"
            shards = leaf.stored.addressable_shards
            assert [shard.device for shard in shards] == DEVICES
            # Padding is less than a sixteenth, or a row of elements' last few.
            assert leaf.size <= sum(shard.data.size for shard in shards) < max(leaf.size * 17 / 16, leaf.size + 4)

    def test_the_update_is_computed_on_the_hosts(self, strategy):
        text = self.lowered(strategy, optax.adamw(1e-3))
        assert '_xla_compute_type = "host"' in text
        assert '_xla_compute_type = "host"' not in self.lowered(jdist.mirrored(), optax.adamw(1e-3))
        assert "reduce_scatter" in text

    def test_the_optimiser_state_never_goes_to_the_devices(self, strategy):
        """Of 6 leaves in parts the step gathers the two that the loss reads."""
        text = self.lowered(strategy, optax.adamw(1e-3))
        assert text.count("stablehlo.all_gather") == 2

    def lowered(self, strategy, tx):
        shapes = jax.eval_shape(lambda: create(tx))
        return jdist.distribute(train_step, strategy).lower(shapes, BATCHES[0]).as_text()

    def test_lowering_takes_a_state_or_its_shapes(self, strategy):
        step = jdist.distribute(train_step, strategy)
        state = strategy.init(lambda: create(optax.sgd(0.1)))
        shapes = jax.eval_shape(lambda: create(optax.sgd(0.1)))
        assert step.lower(state, BATCHES[0]).as_text() == step.lower(shapes, BATCHES[0]).as_text()

    def test_one_device_keeps_everything(self):
        strategy = jdist.central_storage(DEVICES[:1])
        state = strategy.init(lambda: create(optax.sgd(0.1)))
        assert strategy.name == "central_storage"
        assert all(leaf.sharding == strategy.replicated_sharding for leaf in jax.tree.leaves(state))
        got, want = (run(s, train_step, lambda: create(optax.sgd(0.1))) for s in (strategy, jdist.one_device()))
        is_close(got, want, atol=0)


class TestStates:
    def test_a_state_made_elsewhere_is_taken(self, strategy):
        step = jdist.distribute(train_step, strategy)
        expected, _ = step(strategy.init(lambda: create(optax.sgd(0.1))), BATCHES[0])
        for make in (
            lambda: create(optax.sgd(0.1)),
            lambda: jdist.mirrored().init(lambda: create(optax.sgd(0.1))),
            lambda: jdist.central_storage(DEVICES[:2]).init(lambda: create(optax.sgd(0.1))),
            lambda: strategy.fetch(strategy.init(lambda: create(optax.sgd(0.1)))),
        ):
            state, _ = step(make(), BATCHES[0])
            is_close(strategy.fetch(state).params, strategy.fetch(expected).params)
            assert isinstance(state.params["rows"], ShardedLeaf)

    def test_the_caller_keeps_a_state_that_was_not_made_by_the_strategy(self, strategy):
        state = create(optax.sgd(0.1))
        jdist.distribute(train_step, strategy)(state, BATCHES[0])
        assert np.isfinite(np.asarray(state.params["rows"])).all()

    def test_one_array_in_two_places(self, strategy):
        w = strategy.init(lambda: jnp.ones((16, 4)))
        step = jdist.distribute(lambda s, b: {k: v + b["x"].shape[0] for k, v in s.items()}, strategy)
        state = step({"a": w, "b": w}, {"x": np.ones((8, 1), np.float32)})
        np.testing.assert_array_equal(state["a"], np.full((16, 4), 3.0))
        np.testing.assert_array_equal(state["b"], np.full((16, 4), 3.0))

    def test_a_donated_state_is_named(self, strategy):
        step, state = jdist.distribute(train_step, strategy), strategy.init(lambda: create(optax.sgd(0.1)))
        step(state, BATCHES[0])
        with pytest.raises(DonatedStateError, match=r"donated to an earlier call.*first: \.step"):
            step(state, BATCHES[0])
        kept = jdist.distribute(train_step, strategy, donate=False)
        state = strategy.init(lambda: create(optax.sgd(0.1)))
        kept(state, BATCHES[0])
        kept(state, BATCHES[0])

    @pytest.mark.parametrize(
        "other", [jdist.default(), jdist.mirrored(DEVICES), jdist.central_storage(DEVICES[:1])], ids=lambda s: s.name
    )
    def test_other_strategies_refuse_a_state_in_parts_with_the_remedy(self, strategy, other):
        state = strategy.init(lambda: create(optax.sgd(0.1)))
        step = jdist.distribute(train_step, other)
        for use in (
            other.fetch,
            other.check,
            lambda state: other.run(lambda state: state.params["rows"].sum(), state),
            lambda state: step(state, BATCHES[0]),
        ):
            found = r"\.params\['flat'\] is float32\[256, 3\], kept in 4 parts over replica in host memory"
            message = found + r".*; \w+ takes whole arrays\. Pass on what `fetch\(state\)` of the strategy"
            with pytest.raises(StepError, match=message):
                use(state)
        step(strategy.fetch(state), BATCHES[0])

    def test_a_state_that_came_with_residuals_is_fetched_without(self, strategy):
        compressed = jdist.mirrored(DEVICES, all_reduce=jdist.reduction.compressed("bf16"))
        state, _ = jdist.distribute(train_step, compressed)(compressed.init(lambda: create(optax.sgd(0.1))), BATCHES[0])
        is_close(strategy.fetch(state), compressed.fetch(state), atol=0)

    def test_fetch_takes_any_part_of_a_state(self, strategy):
        state = strategy.init(lambda: create(optax.sgd(0.1)))
        assert strategy.fetch(state.params)["rows"].shape == (63, 256)
        assert strategy.fetch(state.params["flat"]).shape == (256, 3)

    def test_an_evaluation_takes_parameters_in_parts_as_an_argument_too(self, strategy):
        state = strategy.init(lambda: create(optax.sgd(0.1)))

        @jdist.distribute(strategy, args=("replicated", "batch"), returns=("examples",))
        def evaluate(params, batch):
            return predict(params, batch["x"])

        want = predict(strategy.fetch(state).params, BATCHES[0]["x"])
        np.testing.assert_allclose(evaluate(state.params, BATCHES[0]), want, atol=1e-6)
        assert "tensor<63x256xf32>" in evaluate.lower(state.params, BATCHES[0]).as_text()

    def test_run_gives_functions_the_whole_state(self, strategy):
        state = strategy.init(lambda: create(optax.sgd(0.1)))
        sums = strategy.run(lambda s: s.params["rows"].sum() * (1 + jdist.replica_id()), state).local_results()
        total = np.asarray(state.params["rows"]).sum()
        np.testing.assert_allclose(sums, total * np.arange(1, 5), rtol=1e-4)


def everything(state, batch):
    """Writes to its state before the gradient, beside it and after it."""
    rng, key = jax.random.split(state.rng)
    keep = jax.random.bernoulli(key, 0.8, (63,))

    def loss_fn(params):
        predictions = predict(params, batch["x"] * keep)
        return jnp.mean((predictions - batch["y"]) ** 2), predictions

    (loss, predictions), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state.params)
    seen = jdist.all_reduce(batch["x"].mean(0), "mean")
    rows = jdist.all_reduce(jnp.float32(batch["x"].shape[0]), "sum")
    new = state.apply_gradients(grads=grads, mean=0.9 * state.extra["mean"] + 0.1 * seen)
    average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state.extra["average"], new.params)
    new = new.replace(average=average, rows=state.extra["rows"] + rows, norm=optax.tree.norm(new.params), rng=rng)
    metrics = {
        "loss": loss,
        "error": jnp.abs(predictions - batch["y"]).mean(),
        "step": new.step,
        "largest": jdist.all_reduce(jnp.abs(batch["x"]).max(), "max"),
        "rows": rows,
        "updated": optax.tree.norm(new.params),
        "weights": new.params["rows"][0],
        "mine": jdist.PerReplica(predictions.sum()),
        "norm for each": jdist.PerReplica(optax.tree.norm(grads)),
    }
    return new, metrics, predictions, predictions.mean()


EVERYTHING = {"returns": ("state", "metrics", "examples", "per_replica")}


def make_everything():
    state = create(optax.sgd(0.1))
    return create(optax.sgd(0.1), mean=jnp.zeros(63), average=state.params, rows=jnp.float32(0), norm=jnp.float32(0))


def test_nothing_that_a_step_writes_or_returns_is_lost(strategy):
    """Everything that mirrored gives, in the same shapes and dtypes."""
    results = []
    for s in (strategy, jdist.mirrored(DEVICES)):
        step, state = jdist.distribute(everything, s, **EVERYTHING), s.init(make_everything)
        for batch in BATCHES:
            state, *outputs = step(state, batch)
        results.append((s.fetch(state), jax.tree.map(np.asarray, outputs)))
    is_close(*results)
    state, (metrics, rows, each) = results[0]
    assert (rows.shape, each.value.shape, metrics["mine"].value.shape) == ((ROWS, 3), (4,), (4,))
    assert float(state.extra["rows"]) == ROWS * len(BATCHES)
    assert float(metrics["step"]) == len(BATCHES)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"steps_per_call": 2}, {"non_finite": "apply"}], ids=str)
def test_constant_metrics(strategy, options):
    def step(w, batch):
        loss, grad = jdist.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
        return w - 0.1 * grad, {"loss": loss, "rows": batch.shape[0], "lr": 0.1, "ones": jnp.ones(3), "yes": np.True_}

    results = []
    for s in (strategy, jdist.mirrored(DEVICES)):
        train_step = jdist.distribute(step, s, **options)
        shape = (2, ROWS, 3) if "steps_per_call" in options else (ROWS, 3)
        w, metrics = train_step(s.init(lambda: jnp.ones(3)), np.ones(shape, np.float32))
        results.append((s.fetch(w), jax.tree.map(np.asarray, metrics)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *results)
    jax.tree.map(lambda a, b: (a.dtype, a.shape) == (b.dtype, b.shape) or pytest.fail(f"{a} {b}"), *results)


def test_evaluation_reads_the_state_and_leaves_it(strategy):
    state = strategy.init(lambda: create(optax.sgd(0.1)))

    def evaluate(state, batch):
        return {"error": jnp.abs(predict(state.params, batch["x"]) - batch["y"]).mean()}

    step = jdist.distribute(evaluate, strategy, args=("state", "batch"), returns=("metrics",))
    want = evaluate(strategy.fetch(state), BATCHES[0])
    for _ in range(2):
        np.testing.assert_allclose(step(state, BATCHES[0])["error"], want["error"], rtol=1e-5)
    rows = jdist.distribute(lambda b: b["x"] * 2, strategy, args=("batch",), returns=("examples",))
    np.testing.assert_array_equal(rows(BATCHES[0]), BATCHES[0]["x"] * 2)


class TestNonFinite:
    def batches(self):
        bad = {**BATCHES[1], "x": np.full_like(BATCHES[1]["x"], np.nan)}
        return [BATCHES[0], bad, BATCHES[2]]

    def test_raise_keeps_the_state_before(self, strategy):
        step = jdist.distribute(train_step, strategy)
        state = strategy.init(lambda: create(optax.adam(1e-2)))
        first, bad, _ = self.batches()
        state, _ = step(state, first)
        step(state, bad)
        with pytest.raises(NonFiniteError, match="step 1: the loss"):
            step.wait()
        want, _ = run(strategy, train_step, lambda: create(optax.adam(1e-2)), BATCHES[:1])
        is_close(strategy.fetch(step.last_state), want, atol=0)

    def test_skip_leaves_the_step_out(self, strategy):
        got, _ = run(strategy, train_step, lambda: create(optax.adam(1e-2)), self.batches(), non_finite="skip")
        want, _ = run(strategy, train_step, lambda: create(optax.adam(1e-2)), [BATCHES[0], BATCHES[2]])
        is_close(got, want)

    def test_apply_lets_it_through(self, strategy):
        got, _ = run(strategy, train_step, lambda: create(optax.sgd(0.1)), self.batches()[:2], non_finite="apply")
        assert np.isnan(got.params["flat"]).all()


def twice(state, batch):
    state, _ = train_step(state, batch)
    return train_step(state, batch)


def own_gradients(state, batch):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((predict(p, batch["x"]) - batch["y"]) ** 2))(state.params)
    return state.apply_gradients(grads=jax.lax.pmean(grads, "replica")), {"loss": loss}


def in_a_loop(state, batch):
    state, metrics = jax.lax.scan(train_step, state, jax.tree.map(lambda x: x[None], batch))
    return state, jax.tree.map(lambda x: x[0], metrics)


def metric_at_the_new_parameters(state, batch):
    new, metrics = train_step(state, batch)
    return new, {**metrics, "after": jnp.mean((predict(new.params, batch["x"]) - batch["y"]) ** 2)}


def collectives_in_both_parts(state, batch):
    loss, grads = jdist.value_and_grad(lambda p: jnp.mean((predict(p, batch["x"]) - batch["y"]) ** 2))(state.params)
    grads = jax.lax.pmean(grads, "replica")
    return state.apply_gradients(grads=grads), {"loss": jax.lax.pmax(loss, "replica")}


@pytest.mark.parametrize(
    ("step", "steps"),
    [
        (twice, 2),
        (own_gradients, 2),
        (in_a_loop, 2),
        (metric_at_the_new_parameters, 2),
        (collectives_in_both_parts, len(BATCHES)),
    ],
)
def test_steps_beyond_one_gradient_and_one_update_are_as_on_one_device(strategy, step, steps):
    got, want = (run(s, step, lambda: create(optax.sgd(0.1)), BATCHES[:steps]) for s in (strategy, jdist.one_device()))
    is_close(got, want)


def test_several_steps_a_call_in_microbatches(strategy):
    stacked = [jax.tree.map(lambda *x: np.stack(x), *BATCHES[i : i + 3]) for i in (0, 3)]
    got = run(strategy, train_step, lambda: create(optax.sgd(0.1)), stacked, steps_per_call=3, accumulate=2)
    want = run(jdist.one_device(), train_step, lambda: create(optax.sgd(0.1)), stacked, steps_per_call=3)
    is_close(got, want)


def test_statistics_that_differ_between_replicas_are_named(strategy):
    def unsynced(state, batch):
        new, metrics = train_step(state, batch)
        return new.replace(mean=batch["x"].mean(0)), metrics

    def make():
        return create(optax.sgd(0.1), mean=jnp.zeros(63))

    with pytest.raises(ReplicaDivergenceError, match=r"extra\['mean'\]"):
        run(strategy, unsynced, make, BATCHES[:1])
    run(strategy, unsynced, make, BATCHES[:1], check_replicas=0)


def test_options(strategy):
    assert jdist.central_storage(DEVICES, axis="batch").axes == ("batch",)
    assert "central_storage: 4 replicas" in repr(strategy)
    assert jdist.make_strategy("central_storage", devices=["cpu:1", "cpu:0"]).num_replicas == 2


def test_prints_of_both_parts(strategy, capfd):
    def step(state, batch):
        jax.debug.print("rows {}", batch["x"].shape[0])
        loss, grads = jdist.value_and_grad(lambda p: jnp.mean((predict(p, batch["x"]) - batch["y"]) ** 2))(state.params)
        new = state.apply_gradients(grads=grads)
        jax.debug.print("weight {}", new.params["rows"][0, 0].astype(jnp.int32))
        return new, {"loss": loss}

    run(strategy, step, lambda: create(optax.sgd(0.1)), BATCHES[:1])
    jax.effects_barrier()
    shown = capfd.readouterr().out
    assert shown.count("rows 2") == shown.count("weight 0") == 4  # one for each replica, as under mirrored


def test_an_entry_a_replica_lies_with_its_replica_also_where_all_are_the_same():
    def train_step(state, batch):
        own = {"mean": batch.mean(), "same": state, "summed": jax.lax.psum(batch.mean(), "replica")}
        return state + 1, own, jnp.stack([state, state + 1])

    strategy = jdist.central_storage(jax.devices()[:4])
    step = jdist.distribute(train_step, strategy, returns=("state", "per_replica", "examples"))
    _, own, rows = step(strategy.init(lambda: jnp.float32(3)), np.arange(8, dtype=np.float32))
    for x in (*jax.tree.leaves(own), rows):
        assert x.sharding == strategy.batch_sharding
    assert own.value["same"].tolist() == [3, 3, 3, 3]
    assert rows.tolist() == [3, 4] * 4
