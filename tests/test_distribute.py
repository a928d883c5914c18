"""The decorator: roles, options, what a call returns, and what it leaves behind."""

import gc
import weakref

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.errors import DonatedStateError, ReplicaDivergenceError, StepError

TWO = jdist.mirrored(["cpu:0", "cpu:1"])
EVERY = {
    "default": jdist.default(),
    "one_device": jdist.one_device("cpu:2"),
    "shard_map": TWO,
    "pmap": jdist.mirrored(["cpu:0", "cpu:1"], transform="pmap"),
    "jit": jdist.mirrored(["cpu:0", "cpu:1"], transform="jit"),
}
BATCH = {"x": np.arange(4, dtype=np.float32), "y": np.ones(4, np.float32), "z": np.ones(4, np.int32)}

_compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: _compiled.append(event) if event.endswith("backend_compile_duration") else None
)


@pytest.fixture
def compiled():
    """Every compilation by XLA since it was last cleared."""
    _compiled.clear()
    return _compiled


def add(w, batch):
    """Adds the mean of x."""
    return w + jdist.all_reduce(batch["x"].mean()), {"x": batch["x"].mean()}


@pytest.fixture(params=EVERY)
def strategy(request):
    return EVERY[request.param]


class TestForms:
    def test_decorator_and_function(self, strategy):
        decorated = jdist.distribute(strategy, donate=False)(add)
        called = jdist.distribute(add, strategy, donate=False)
        for step in (decorated, called):
            state, metrics = step(1.0, BATCH)
            assert (float(state), float(metrics["x"])) == (2.5, 1.5)
            assert step.strategy is strategy
            assert step.options.donate is False

    def test_it_looks_like_the_step(self):
        step = jdist.distribute(add, TWO)
        assert (step.__name__, step.__doc__, step.__wrapped__) == ("add", "Adds the mean of x.", add)
        assert repr(step) == f"<add distributed by {TWO!r}>"

    def test_a_callable_without_a_name(self):
        class Step:
            def __call__(self, w, batch):
                return w + 1, {}

        step = jdist.distribute(Step(), TWO)
        assert float(step(1.0, BATCH)[0]) == 2.0
        assert "the step" in repr(step)

    def test_a_method_and_a_partial(self):
        import functools

        class Trainer:
            rate = 2.0

            def step(self, w, batch):
                return w + self.rate, {}

        assert float(jdist.distribute(Trainer().step, TWO)(1.0, BATCH)[0]) == 3.0
        partial = functools.partial(lambda rate, w, batch: (w + rate, {}), 5.0)
        assert float(jdist.distribute(partial, TWO)(1.0, BATCH)[0]) == 6.0

    def test_nothing_keeps_a_dropped_step_alive(self):
        def local(w, batch):
            return w + 1, {}

        step = jdist.distribute(local, TWO)
        step(1.0, BATCH)
        gone = weakref.ref(step)
        del step, local
        gc.collect()
        assert gone() is None


class TestRoles:
    def test_every_role(self, strategy):
        def step(scale, kind, w, batch, extra, more):
            assert kind == "add"
            assert batch["x"].shape[0] * (strategy.num_replicas if strategy.transform != "jit" else 1) == 4
            assert extra["t"].shape == (4,)
            return w + scale * extra["t"].sum() + more.sum(), {"x": batch["x"].mean()}

        run = jdist.distribute(step, strategy, args=("replicated", "static", "state", "batch", "replicated"))
        extra = {"t": np.arange(4.0, dtype=np.float32)}
        state, metrics = run(jnp.float32(2), "add", 1.0, BATCH, extra, np.ones(3, np.float32))
        assert (float(state), float(metrics["x"])) == (16.0, 1.5)
        state, _ = run(0.5, "add", state, BATCH, extra, np.ones(3, np.float32))
        assert float(state) == 22.0

    def test_two_batches(self, strategy):
        def step(w, a, b):
            return w, {"product": (a["x"] * b).mean()}

        run = jdist.distribute(step, strategy, args=("state", "batch", "batch"))
        assert float(run(1.0, BATCH, np.full(4, 2.0, np.float32))[1]["product"]) == 3.0

    def test_further_arguments_and_keywords_are_replicated(self, strategy):
        def step(w, batch, key, *, scale=1.0, shift):
            assert scale.shape == ()
            return w + scale * shift.sum(), {"draw": jax.random.normal(key)}

        run = jdist.distribute(step, strategy)
        key = jax.random.key(1)
        for scale in (2.0, jnp.float32(2)):
            state, metrics = run(0.0, BATCH, key, scale=scale, shift=np.ones(4, np.float32))
            assert float(state) == 8.0
            assert float(metrics["draw"]) == pytest.approx(float(jax.random.normal(key)))

    def test_positional_arguments_by_keyword(self):
        def step(w, batch, shift, kind):
            assert kind == "add"
            return w + shift, {"x": batch["x"].mean()}

        run = jdist.distribute(step, TWO, args=("state", "batch", "replicated", "static"))
        for args, kwargs in (
            ((1.0, BATCH, 2.0), {"kind": "add"}),
            ((1.0, BATCH), {"kind": "add", "shift": 2.0}),
            ((1.0,), {"kind": "add", "shift": 2.0, "batch": BATCH}),
            ((), {"kind": "add", "shift": 2.0, "batch": BATCH, "w": 1.0}),
        ):
            state, metrics = run(*args, **kwargs)
            assert (float(state), float(metrics["x"])) == (3.0, 1.5)

    def test_another_static_value_compiles_again_and_the_same_does_not(self, compiled):
        traced = []

        def step(w, batch, power):
            traced.append(power)
            return w, {"x": (batch["x"] ** power).mean()}

        run = jdist.distribute(step, TWO, args=("state", "batch", "static"))
        state = TWO.init(lambda: jnp.float32(1))
        compiled.clear()
        results = []
        for power in (1, 2, 1, 2, 1):
            state, metrics = run(state, BATCH, power)
            results.append(metrics["x"])
        assert [float(x) for x in results] == [1.5, 3.5, 1.5, 3.5, 1.5]
        assert traced == [1, 2]

    def test_static_values_that_are_equal_but_of_another_type(self):
        run = jdist.distribute(
            lambda w, b, one: (w, {"kind": len(type(one).__name__)}), TWO, args=("state", "batch", "static")
        )
        assert [float(run(1.0, BATCH, one)[1]["kind"]) for one in (1, 1.0, True)] == [3, 5, 4]

    def test_static_keywords(self):
        traced = []

        def step(w, batch, *, train):
            traced.append(train)
            return w + (1 if train else 0), {}

        run = jdist.distribute(step, TWO, static_argnames=("train",))
        state = 0.0
        for train in (True, False, True):
            state, _ = run(state, BATCH, train=train)
        assert float(state) == 2.0
        assert traced == [True, False]

    def test_static_names_by_position(self):
        run = jdist.distribute(lambda w, batch, train: (w + (1 if train else 0), {}), TWO, static_argnames="train")
        assert float(run(0.0, BATCH, True)[0]) == 1.0

    def test_static_names_that_the_step_has_not(self):
        with pytest.raises(StepError, match="trian"):
            jdist.distribute(lambda w, batch, train: (w, {}), TWO, static_argnames="trian")

    def test_a_static_value_that_cannot_be_hashed(self):
        run = jdist.distribute(lambda w, b, s: (w, {}), TWO, args=("state", "batch", "static"))
        with pytest.raises(
            StepError, match=r"static argument of .* cannot be hashed: unhashable.*Pass it as replicated"
        ):
            run(1.0, BATCH, [1])

    def test_too_few_arguments(self):
        with pytest.raises(
            StepError, match=r"add was called with 1 arguments by position; its roles are \('state', 'batch'"
        ):
            jdist.distribute(add, TWO)(1.0)

    def test_the_state_alone_may_be_the_argument(self):
        assert float(jdist.distribute(lambda w: w + 1, TWO, args=("state",))(1.0)) == 2.0


class TestEvaluation:
    def data(self, strategy):
        source = jdist.data.from_arrays({"x": np.arange(10, dtype=np.float32)}, global_batch=4)
        return strategy.distribute_dataset(source)

    def test_examples_come_in_input_order_without_padding(self, strategy):
        def predict(w, batch):
            return {"p": w["w"] * batch["x"], "pair": jnp.stack([batch["x"]] * 2, 1)}, jdist.mean(
                batch["x"], batch["mask"]
            )

        run = jdist.distribute(predict, strategy, args=("state", "batch"), returns=("examples", "metrics"))
        state = strategy.init(lambda: {"w": jnp.float32(2), "more": jnp.zeros(3)})
        out = [run(state, batch) for batch in self.data(strategy)]
        assert np.concatenate([rows["p"] for rows, _ in out]).tolist() == [2.0 * i for i in range(10)]
        assert np.concatenate([rows["pair"] for rows, _ in out])[:, 1].tolist() == [float(i) for i in range(10)]
        assert [float(m) for _, m in out] == [1.5, 5.5, 8.5]
        assert not state["w"].is_deleted()

    def test_examples_of_batches_that_are_no_dicts(self):
        run = jdist.distribute(lambda w, batch: batch[0] * w, TWO, returns="examples")
        batches = TWO.distribute_dataset([np.arange(4.0), np.arange(3.0)], with_mask=True)
        assert [len(run(1.0, batch)) for batch in batches] == [4, 3]

    def test_one_result_comes_bare_and_a_tuple_of_one_as_a_tuple(self):
        bare = jdist.distribute(lambda b: {"x": b["x"].mean()}, TWO, args=("batch",))
        assert float(bare(BATCH)["x"]) == 1.5
        one = jdist.distribute(lambda b: (b["x"].mean(),), TWO, args="batch", returns="metrics")
        (x,) = one(BATCH)
        assert float(x) == 1.5

    def test_the_order_of_results_is_the_steps(self):
        run = jdist.distribute(
            lambda w, b: (b["x"].mean(), w + 1, b["x"], b["x"].sum()),
            TWO,
            returns=("metrics", "state", "examples", "per_replica"),
        )
        x, state, rows, own = run(1.0, BATCH)
        assert (float(x), float(state), rows.tolist()) == (1.5, 2.0, [0, 1, 2, 3])
        assert own.local_results() == (1.0, 5.0)

    def test_the_same_state_serves_many_evaluations(self, strategy):
        train = jdist.distribute(add, strategy)
        evaluate = jdist.distribute(lambda w, b: w * b["x"].mean(), strategy, returns="metrics")
        state, _ = train(1.0, BATCH)
        assert [float(evaluate(state, BATCH)) for _ in range(3)] == [3.75] * 3
        state, _ = train(state, BATCH)
        assert float(evaluate(state, BATCH)) == 6.0
        assert evaluate.last_state is None


class TestState:
    def test_donated_unless_asked_otherwise(self, strategy):
        for donate in (True, False):
            step = jdist.distribute(add, strategy, donate=donate)
            first = strategy.init(lambda: jnp.zeros(100))
            second, _ = step(first, BATCH)
            third, _ = step(second, BATCH)
            assert first.is_deleted() is second.is_deleted() is donate
            assert float(third[0]) == 3.0

    def test_a_donated_state_used_again_is_refused_by_name(self, strategy):
        step = jdist.distribute(lambda s, b: ({"w": s["w"] + 1, "n": s["n"]}, {}), strategy)
        first = strategy.init(lambda: {"w": jnp.zeros(100), "n": jnp.int32(0)})
        step(first, BATCH)
        with pytest.raises(DonatedStateError, match=r"donated to an earlier call.*first: \['.'\].*last_state"):
            step(first, BATCH)
        evaluate = jdist.distribute(lambda s, b: s["w"].sum(), strategy, returns="metrics")
        with pytest.raises(DonatedStateError):
            evaluate(first, BATCH)
        assert float(evaluate(step.last_state, BATCH)) == 100.0

    def test_last_state_is_the_newest(self, strategy):
        step = jdist.distribute(add, strategy)
        assert step.last_state is None
        state, _ = step(1.0, BATCH)
        assert step.last_state is state

    def test_after_an_interrupt_the_last_state_is_there(self, strategy, monkeypatch):
        step = jdist.distribute(add, strategy)
        state, _ = step(strategy.init(lambda: jnp.float32(1)), BATCH)

        def interrupt(token):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(step._window, "add", interrupt)
            with pytest.raises(KeyboardInterrupt):
                step(state, BATCH)
        assert float(step.last_state) == 4.0
        assert float(step(step.last_state, BATCH)[0]) == 5.5

    def test_after_an_error_in_the_step_the_state_is_as_it_was(self, strategy):
        fail = []

        def step(w, batch):
            if fail:
                raise KeyError("mine")
            return w + 1, {}

        run = jdist.distribute(step, strategy)
        state, _ = run(strategy.init(lambda: jnp.float32(1)), BATCH)
        fail.append(1)
        with pytest.raises(KeyError, match="mine"):
            run(state, jax.tree.map(lambda x: x[:2], BATCH))  # another shape is traced again
        assert run.last_state is state
        assert float(run(state, BATCH)[0]) == 3.0

    def test_shardings_and_types_are_preserved(self, strategy):
        def create():
            return {"w": jnp.ones((4, 4), jnp.bfloat16), "n": 0, "key": jax.random.key(0), "x": jnp.float16(1)}

        def step(s, batch):
            key, _ = jax.random.split(s["key"])
            return {"w": s["w"] * 2, "n": s["n"] + 1, "key": key, "x": s["x"]}, {}

        state = strategy.init(create)
        run = jdist.distribute(step, strategy)
        new = state
        for _ in range(2):
            new, _ = run(new, BATCH)
        for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
            assert (after.shape, after.dtype, after.committed) == (before.shape, before.dtype, before.committed)
            assert not jax.typeof(after).weak_type
            if strategy.mesh is not None:
                assert after.sharding == strategy.replicated_sharding

    def test_a_state_the_user_changed_between_calls(self, strategy):
        run = jdist.distribute(lambda s, b: ({**s, "w": s["w"] + 1}, {}), strategy)
        state, _ = run({"w": jnp.ones(2), "epoch": 0}, BATCH)
        state, _ = run({**state, "epoch": 5}, BATCH)
        assert int(state["epoch"]) == 5
        assert state["w"].tolist() == [3, 3]

    def test_a_state_that_differs_is_not_healed_by_a_change_of_the_user(self):
        def local(s, batch):
            return {**s, "w": s["w"] + batch["x"].mean()}, {}

        run = jdist.distribute(local, TWO, check_replicas=0)
        state, _ = run({"w": jnp.ones(2), "epoch": 0}, BATCH)
        state, _ = run({**state, "epoch": 5}, BATCH)
        with pytest.raises(ReplicaDivergenceError) as caught:
            TWO.fetch(state)
        assert caught.value.leaves == ("['w']",)


class TestCompilations:
    def test_exactly_one_over_many_calls(self, strategy, compiled):
        run = jdist.distribute(add, strategy, check_replicas=0)
        source = jdist.data.from_arrays(
            {"x": np.arange(10, dtype=np.float32), "y": np.ones(10)}, global_batch=4, epochs=2
        )
        batches = list(strategy.distribute_dataset(source))  # each epoch ends with a short one
        assert len(batches) == 6
        state = strategy.init(lambda: jnp.float32(1))
        compiled.clear()
        for batch in batches:
            state, _ = run(state, batch)
        run.wait()
        assert len(compiled) == (2 if strategy.transform == "pmap" else 1)  # pmap: and one that cuts the batch

    @pytest.mark.parametrize("kind", ["python", "numpy", "jax"])
    def test_none_after_the_first_whatever_the_state_was_made_of(self, strategy, compiled, kind):
        make = {"python": float, "numpy": np.float32, "jax": jnp.float32}[kind]
        run = jdist.distribute(add, strategy)
        state, _ = run(make(1), BATCH)
        state, _ = run(state, BATCH)
        compiled.clear()
        for _ in range(10):
            state, _ = run(state, BATCH)
        run.wait()
        assert compiled == []

    def test_a_learning_rate_that_changes_compiles_nothing(self, compiled):
        run = jdist.distribute(lambda w, b, lr: (w - lr, {}), TWO)
        state, _ = run(1.0, BATCH, 0.1)
        state, _ = run(state, BATCH, 0.2)
        compiled.clear()
        for lr in (0.3, 0.4, 0.5):
            state, _ = run(state, BATCH, lr)
        assert compiled == []


class TestBatches:
    @pytest.mark.parametrize("kind", ["numpy", "jax", "other device"])
    def test_batches_need_not_be_placed(self, strategy, kind):
        put = {"numpy": np.asarray, "jax": jnp.asarray, "other device": lambda x: jax.device_put(x, jax.devices()[5])}
        if strategy.mesh is None and kind == "other device":
            return
        state, metrics = jdist.distribute(add, strategy)(1.0, jax.tree.map(put[kind], BATCH))
        assert (float(state), float(metrics["x"])) == (2.5, 1.5)

    def test_a_batch_is_never_donated(self, strategy):
        batch = jax.tree.map(jnp.asarray, BATCH)
        run = jdist.distribute(add, strategy)
        state, _ = run(1.0, batch)
        state, _ = run(state, batch)
        assert float(state) == 4.0
        assert batch["x"].tolist() == [0, 1, 2, 3]

    def test_a_numpy_batch_may_be_refilled_after_the_call(self):
        memory = np.zeros(4096 * 4 + 64, np.uint8)
        start = -memory.ctypes.data % 64
        x = memory[start : start + 4096 * 4].view(np.float32)

        def slow(w, batch):  # the second call cannot start before the first has ended
            w = jax.lax.fori_loop(0, 1000, lambda _, w: jnp.tanh(w @ w), w)
            return w, {"x": batch["x"].mean()}

        run = jdist.distribute(slow, TWO)
        x[:] = 1
        state, _ = run(jnp.ones((100, 100)), {"x": np.array(x)})
        run.wait()
        state, _ = run(state, {"x": np.array(x)})
        state, metrics = run(state, {"x": x})
        x[:] = 100
        assert float(metrics["x"]) == 1.0


class TestLower:
    def test_it_runs_nothing_and_takes_arrays_or_shapes(self, strategy):
        run = jdist.distribute(add, strategy)
        arrays = run.lower(1.0, BATCH).as_text()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCH)
        assert run.lower(jax.ShapeDtypeStruct((), jnp.float32), shapes).as_text() == arrays
        assert run.last_state is None
        state = strategy.init(lambda: jnp.float32(1))
        run.lower(state, BATCH).compile()
        assert float(run(state, BATCH)[0]) == 2.5

    def test_roles_and_options_as_in_a_call(self):
        def step(w, batch, kind, *, scale):
            assert kind == "add"
            return w + scale, {"x": batch["x"].mean()}

        run = jdist.distribute(step, TWO, args=("state", "batch", "static"), steps_per_call=2)
        text = run.lower(1.0, jax.tree.map(lambda x: np.stack([x, x]), BATCH), "add", scale=2.0).as_text()
        assert "stablehlo.while" in text


def test_wait_before_and_after_calls():
    run = jdist.distribute(add, TWO)
    run.wait()
    run(1.0, BATCH)
    run.wait()
    run.wait()


def test_the_name_in_an_error_is_of_the_program_that_met_it():
    """Another static value is another program, which may watch other values."""

    def step(w, batch, train):
        if train:
            loss, grad = jdist.value_and_grad(lambda w: (w * batch["x"]).mean())(w["a"])
            return {**w, "a": w["a"] - grad}, {"loss": loss}
        return {"a": w["a"] + 0, "b": w["b"] + 1}, {"loss": 0.0}

    run = jdist.distribute(step, TWO, args=("state", "batch", "static"))
    bad = {**BATCH, "x": BATCH["x"] * np.nan}
    state, _ = run({"a": 1.0, "b": 1.0}, bad, True)
    run(state, BATCH, False)
    with pytest.raises(jdist.errors.NonFiniteError) as caught:
        run.wait()
    assert caught.value.leaf == "the loss"
