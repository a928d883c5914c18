"""The distributed step: what a call returns, what it leaves behind, and how often it compiles."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import jax_utils

import jdist
from jdist.errors import BatchError, DonatedStateError, ReplicaDivergenceError, StepError
from tests.toys import BATCH, EVERY, TWO, add


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

        def interrupt(token, lineage):
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
    @pytest.mark.filterwarnings("ignore:add never reads")  # the filling counts in its means, which nobody looks at
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
        assert len(compiled) == 1

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


class TestRefused:
    def test_a_call_while_jax_traces(self, strategy):
        run = jdist.distribute(lambda w, batch, *more: (w + 1, {}), strategy)
        evaluate = jdist.distribute(lambda batch: batch["x"].mean(), strategy, args=("batch",))
        for call in (
            lambda: jax.jit(lambda w: run(w, BATCH))(1.0),
            lambda: jax.lax.scan(lambda w, _: run(w, BATCH), 1.0, None, length=2),
            lambda: jax.jit(lambda batch: run(1.0, batch))(BATCH),
            lambda: jax.jit(evaluate)(BATCH),
            lambda: jax.jit(lambda lr: run(1.0, BATCH, lr))(0.1),
        ):
            with pytest.raises(StepError, match=r"called while JAX traces.*from plain Python.*`steps_per_call`"):
                call()

    @pytest.mark.parametrize("how", ["call", "lower"])
    def test_an_axis_that_nothing_binds(self, strategy, how):
        run = jdist.distribute(lambda w, batch: (jax.lax.pmean(w, "batch"), {}), strategy)
        binds = re.escape(str(strategy.axes or "none"))
        said = rf"{strategy.name} does not bind; it binds {binds}.*axis=\.\.\."
        if strategy is EVERY["jit"]:
            said = r"in the global view \(transform=\"jit\"\) none is bound.*`jdist\.replica_axes\(\)`"
        with pytest.raises(StepError, match=f"batch.*{said}"):
            (run if how == "call" else run.lower)(1.0, BATCH)

    def test_a_state_in_parts(self, strategy):
        run = jdist.distribute(lambda s, batch: (s, {}), strategy)
        state = {"n": 1, "w": jax_utils.replicate(jnp.ones(2))}
        message = r"leaf \['w'\], float32\[8, 2\], is spread over 8 devices in parts.*delete the line with `jax_utils\."
        with pytest.raises(StepError, match=message):
            run(state, BATCH)


class TestWrongArguments:
    """What was taken as what is said, in the message or in a note beside it."""

    def step(self, state, batch):
        return {"w": state["w"] + batch["x"].mean()}, {}

    @pytest.mark.parametrize("how", ["call", "lower"])
    def test_swapped(self, strategy, how):
        run = jdist.distribute(self.step, strategy)
        with pytest.raises(KeyError) as caught:
            (run if how == "call" else run.lower)(BATCH, {"w": np.ones((4, 3), np.float32)})
        (note,) = [note for note in caught.value.__notes__ if "role" in note]
        assert note.splitlines() == [
            "step was called with:",
            "  argument 1 `state`, role \"state\": ['x'] float32[4], ['y'] float32[4], ['z'] int32[4]",
            "  argument 2 `batch`, role \"batch\": ['w'] float32[4, 3]",
        ]

    def test_a_batch_without_the_mask_that_a_dataset_adds(self, strategy):
        def step(state, batch):
            return {"w": state["w"] + (batch["x"] * batch["mask"]).sum()}, {}

        with pytest.raises(
            StepError, match=r'reads batch\["mask"\], and this batch has none.*`distribute_dataset` adds it'
        ):
            jdist.distribute(step, strategy)({"w": np.zeros((), np.float32)}, {"x": np.ones(4, np.float32)})

    @pytest.mark.parametrize(
        ("batch", "message"),
        [
            ({"w": 1.0}, r"leaf \['w'\] has shape \(\)(?s:.)*`state`, role \"state\": \['w'\] float"),
            ({"x": [1.0, 2.0]}, r"\['x'\]\[0\] has shape \(\).*make the list an array with `numpy.asarray`"),
            *[
                ({"x": np.ones(4), "t": [leaf]}, rf"batch leaf \['t'\]\[0\] \({kind}.*arrays of numbers \(token ids")
                for leaf, kind in (
                    (np.array(list("abcd")), r"a ndarray\) has dtype <U1"),
                    ("abcd", r"a str\) has dtype <U4"),
                    (object(), r"a object\) has dtype object"),
                    (np.array([None] * 4), r"a ndarray\) has dtype object"),
                    (np.zeros(4, "M8[s]"), r"a ndarray\) has dtype datetime64"),
                )
            ],
        ],
    )
    def test_what_can_be_no_batch(self, strategy, batch, message):
        with pytest.raises(BatchError, match=message):
            jdist.distribute(self.step, strategy)({"w": 1.0}, batch)

    def test_a_batch_that_can_be_no_state(self):
        (batch,) = TWO.distribute_dataset([BATCH])
        with pytest.raises(
            StepError, match=r"\['mask'\].*spread over 2(?s:.)*argument 2 `batch`, role \"batch\": \['w'\]"
        ):
            jdist.distribute(self.step, TWO)(batch, {"w": jnp.ones(4)})

    def test_text_as_a_further_argument(self, strategy):
        run = jdist.distribute(lambda w, batch, kind, **more: (w, {}), strategy)
        with pytest.raises(
            StepError, match=r"argument 3 `kind` of <lambda>, role \"replicated\".*is a str.*\"static\""
        ):
            run(1.0, BATCH, "add")
        with pytest.raises(StepError, match=r"keyword argument `how` of .*\['a'\] is a str.*`static_argnames`"):
            run(1.0, BATCH, 1.0, how={"a": "add"})

    def test_a_type_error_of_the_step_stays_what_it_is(self, strategy):
        with pytest.raises(TypeError, match="unsupported operand"):
            jdist.distribute(lambda w, batch: (w + None, {}), strategy)(1.0, BATCH)

    def test_a_state_that_another_step_consumed(self, strategy):
        first, second = jdist.distribute(add, strategy), jdist.distribute(add, strategy)
        state, _ = first(strategy.init(lambda: jnp.float32(0)), BATCH)
        second(state, BATCH)
        with pytest.raises(DonatedStateError, match="donated to an earlier call"):
            first(state, BATCH)


@pytest.mark.parametrize(
    "make", [lambda: jdist.one_device("cpu:1", axis="batch"), lambda: jdist.mirrored(axis="batch")]
)
def test_an_axis_of_the_users_own_name(make):
    def step(w, batch):
        return w + jax.lax.pmean(batch["x"].mean(), axis_name="batch"), {}

    assert float(jdist.distribute(step, make())(1.0, {"x": np.arange(8.0)})[0]) == 4.5


class TestExamplesAndMasks:
    """Only rows that a mask leaves out are dropped, and only a mask is a mask."""

    strategy = jdist.mirrored(jax.local_devices()[:4])

    def predict(self, fn, batches, **options):
        run = jdist.distribute(fn, self.strategy, args=("state", "batch"), returns=("examples",))
        return [np.asarray(run(0.0, b)) for b in self.strategy.distribute_dataset(batches, **options)]

    def test_labels_that_are_bool_are_no_mask(self):
        x, y = np.arange(8.0, dtype=np.float32), np.arange(8) % 2 == 0
        (rows,) = self.predict(lambda _, batch: batch[0], [(x, y)])
        assert rows.tolist() == x.tolist()

    def test_a_leaf_with_the_name_of_the_mask_is_no_mask(self):
        for mask in (np.ones((8, 3), bool), np.arange(8) % 2.0, np.zeros(8, bool)):
            source = [{"x": np.arange(n, dtype=np.float32), "mask": mask[:n]} for n in (8, 5)]
            for strategy in EVERY.values():
                run = jdist.distribute(lambda _, pair: pair[0]["x"], strategy, returns="examples")
                rows = [run(0.0, batch).tolist() for batch in strategy.distribute_dataset(source, with_mask=True)]
                assert rows == [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4]]

    def test_a_batch_that_the_user_changed_or_moved(self):
        run = jdist.distribute(lambda _, batch: batch["x"], self.strategy, returns="examples")
        source = [{"x": np.arange(n, dtype=np.float32)} for n in (8, 5)]
        _, short = self.strategy.distribute_dataset(source)
        assert run(0.0, {**short, "x": short["x"] * 2}).tolist() == [0, 2, 4, 6, 8]
        elsewhere = {"x": np.asarray(short["x"]), "mask": short["mask"]}  # placed again by the call
        assert run(0.0, elsewhere).tolist() == [0, 1, 2, 3, 4]

    def test_a_pair_of_batch_and_mask_also_taken_apart(self):
        run = jdist.distribute(lambda _, batch: batch[0], self.strategy, returns="examples")
        batches = self.strategy.distribute_dataset([np.arange(4.0), np.arange(3.0)], with_mask=True)
        assert [len(run(0.0, batch)) for batch in batches] == [4, 3]
        assert [len(run(0.0, (x, mask))) for x, mask in batches] == [4, 3]

    def test_another_number_of_rows_is_refused(self):
        with pytest.raises(StepError, match=r"shape \(1,\).*each of the 2 rows"):
            self.predict(lambda _, batch: batch["x"].sum(keepdims=True), [{"x": np.ones(8, np.float32)}])
