"""What a step returned: told apart by role, and averaged over the replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.errors import StepError
from jdist.step.outputs import Traced
from tests.toys import EVERY, TWO

X = {"x": np.arange(4, dtype=np.float32), "z": np.ones(4)}


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
            above = jnp.stack([b["y"] > 1, b["y"] > 2])[:, :1].astype(float)
            return s, (loss, [b["y"].sum(), jdist.all_reduce(b["y"].sum(), "sum"), 3, True, None, above.T])

        loss, (total, summed, three, true, none, array) = jdist.distribute(step, TWO)(1.0, self.batch)[1]
        assert (float(loss), float(total), float(summed)) == (3.0, 3.0, 6.0)
        assert (float(three), float(true), none) == (3.0, 1.0, None)
        assert array.tolist() == [[0.5, 0.0]]

    @pytest.mark.parametrize(
        ("result", "message"),
        [
            (lambda s: (s, {}, {}), r"returned 3 values; say what they are, for example `returns="),
            (lambda s: {"w": s["w"]}, r"(?s)another tree.*\['n'\]: gone"),
            (lambda s: None, r"(?s)another tree.*\['n'\]: gone.*\['w'\]: gone"),
            (lambda s: ({"w": s["w"]}, {}), r"(?s)another tree.*\['n'\]: gone"),
            (lambda s: ({**s, "w": s["w"][:1]}, {}), r"\['w'\]: float32\[2\] before, float32\[1\] after"),
            (lambda s: ({**s, "n": s["n"] + 0.5}, {}), r"\['n'\]: int32\[\] before, float32\[\] after"),
            (lambda s: ({**s, "w": s["w"].astype(jnp.bfloat16)}, {}), r"float32\[2\] before, bfloat16\[2\] after"),
        ],
    )
    def test_another_state_than_came_in(self, result, message):
        with pytest.raises(StepError, match=message):
            jdist.distribute(lambda s, b: result(s), TWO)({"w": jnp.ones(2), "n": 0}, self.batch)

    @pytest.mark.parametrize(
        ("step", "returns", "message"),
        [
            (
                lambda w, x: (w, {}),
                ("state", "metrics", "examples"),
                r"returned a tuple of 2, but `returns` is \('state', 'metrics', 'examples'\)",
            ),
            (lambda w, x: {}, ("metrics", "examples"), "returned a dict, but"),
            (lambda w, x: x.sum(), "examples", "examples"),
            (
                lambda w, x: (w, jax.random.key(0)),
                None,
                "PRNG key among its metrics, which cannot be averaged.*the state",
            ),
            (lambda w, x: (w, {"t": jdist.PerReplica("abc")}), None, r"\['t'\]\.value is a str\. Return numbers"),
            (lambda w, x: ("abc", {}), None, "the state that the step returned has a leaf.* itself is a str"),
            (lambda w, x: ({"w": "abc"}, {}), None, r"the state that the step returned has a leaf.*\['w'\] is a str"),
        ],
    )
    def test_what_is_refused(self, step, returns, message):
        with pytest.raises(StepError, match=message):
            jdist.distribute(step, TWO, returns=returns)(1.0, np.ones(4))

    def test_one_result_comes_bare_and_a_tuple_of_one_as_a_tuple(self):
        bare = jdist.distribute(lambda b: {"x": b["x"].mean()}, TWO, args=("batch",))
        assert float(bare(X)["x"]) == 1.5
        one = jdist.distribute(lambda b: (b["x"].mean(),), TWO, args="batch", returns="metrics")
        (x,) = one(X)
        assert float(x) == 1.5

    def test_the_order_of_results_is_the_steps(self):
        run = jdist.distribute(
            lambda w, b: (b["x"].mean(), w + 1, b["x"], b["x"].sum()),
            TWO,
            returns=("metrics", "state", "examples", "per_replica"),
        )
        x, state, rows, own = run(1.0, X)
        assert (float(x), float(state), rows.tolist()) == (1.5, 2.0, [0, 1, 2, 3])
        assert own.local_results() == (1.0, 5.0)


@pytest.mark.parametrize("strategy", EVERY.values(), ids=EVERY)
class TestDtypes:
    """What is the same on every replica keeps its dtype; what is averaged is floating point; a count has no mean."""

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_of_metrics(self, strategy, accumulate):
        constants = {"bool": True, "int8": jnp.int8(100), "uint32": jnp.uint32(7), "half": jnp.bfloat16(2)}

        def step(w, batch):
            loss, grad = jdist.value_and_grad(lambda w: jdist.mean(w * batch["x"]))(w)
            totals = {"rows": jdist.all_reduce((batch["x"] >= 0).sum(), "sum"), "python": 2, "numpy": np.int64(5)}
            more = {"loss": loss, "number": 0.5, "z": jnp.complex64(1j), "mean": batch["x"].astype(jnp.bfloat16).mean()}
            return w - grad, {**constants, **totals, **more}

        _, metrics = jdist.distribute(step, strategy, accumulate=accumulate)(1.0, X)
        assert {name: metrics[name].dtype for name in constants} == {
            name: jnp.result_type(x) for name, x in constants.items()
        }
        whole, real = ("rows", "python", "numpy"), ("loss", "number")
        assert {metrics[name].dtype for name in whole} == {jnp.dtype(jnp.int32)}
        assert {metrics[name].dtype for name in real} == {jnp.dtype(jnp.float32)}
        assert (metrics["z"].dtype, metrics["mean"].dtype) == (jnp.complex64, jnp.bfloat16)
        assert [int(metrics[name]) for name in whole] == [len(X["x"]), 2, 5]

    @pytest.mark.parametrize("accumulate", [1, 2])
    @pytest.mark.parametrize("count", [lambda x: (x > 1).sum(), lambda x: x.argmax(), lambda x: x.max() > 1])
    def test_a_count_of_own_rows_is_refused(self, strategy, accumulate, count):
        def step(w, batch):
            loss, grad = jdist.value_and_grad(lambda w: jdist.mean(w * batch["x"]))(w)
            return w - grad, {"loss": loss, "right": count(batch["x"])}

        with pytest.raises(StepError, match=r"metric \['right'\].*`jdist\.all_reduce\(x, \"sum\"\)`"):
            jdist.distribute(step, strategy, accumulate=accumulate)(1.0, X)

    def test_with_64_bits(self, strategy):
        with jax.enable_x64(True):
            run = jdist.distribute(lambda w, batch: (w, {"n": 2**40 + jnp.int64(1)}), strategy)
            metric = run(1.0, X)[1]["n"]
        assert (metric.dtype, int(metric)) == (jnp.int64, 2**40 + 1)

    def test_of_several_steps_a_call(self, strategy):
        run = jdist.distribute(lambda w, batch: (w, {"n": 3}), strategy, steps_per_call=2)
        metric = run(1.0, {"x": np.zeros((2, 4))})[1]["n"]
        assert (metric.dtype, metric.tolist()) == (jnp.int32, [3, 3])

    def test_other_results_keep_theirs(self, strategy):
        def step(batch):
            return batch["x"] > 1, jnp.int32(1)

        rows, *own = jdist.distribute(step, strategy, args=("batch",), returns=("examples", "per_replica"))(X)
        assert rows.dtype == jnp.bool_
        assert all(x.value.dtype == jnp.int32 for x in own)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", EVERY.values(), ids=EVERY)
def test_a_total_or_an_extreme_of_integers_stays_one(strategy, accumulate):
    big = 2**24 + 1  # float32 does not hold it

    def step(w, batch):
        loss, _ = jdist.value_and_grad(lambda w: w * batch["x"].mean())(w)
        n = jnp.where(batch["x"].sum() > -1e9, jnp.int32(big), 0)  # of the batch, so once a microbatch
        metrics = {"mean": jdist.all_reduce(jnp.int8(100)), "unlike": jnp.asarray(2) * 1, "loss": loss}
        return w, {**metrics, "max": jdist.all_reduce(n, "max"), "sum": jdist.all_reduce(n, "sum")}

    metrics = jdist.distribute(step, strategy, accumulate=accumulate)(1.0, X)[1]
    replicas = (1 if strategy.transform == "jit" else strategy.num_replicas) * accumulate  # the global view is one
    assert (metrics["sum"].dtype, int(metrics["sum"])) == (jnp.int32, replicas * big)
    assert (metrics["max"].dtype, int(metrics["max"])) == (jnp.int32, big)
    assert (metrics["mean"].dtype, float(metrics["mean"])) == (jnp.float32, 100.0)
    assert float(metrics["unlike"]) == 2.0


class TestTextAndObjects:
    @pytest.mark.parametrize("role", ["metrics", "examples", "per_replica"])
    @pytest.mark.parametrize(
        ("leaf", "kind"), [("abc", "str"), (object(), "object"), (len, "builtin"), (np.array(["a"]), "ndarray of <U1")]
    )
    @pytest.mark.parametrize(
        "strategy", [s for s in EVERY.values() if s.transform != "jit"], ids=lambda s: f"{s.transform}"
    )
    def test_among_the_results(self, role, leaf, kind, strategy):
        run = jdist.distribute(lambda w, b: (w, {"a": b["x"], "t": [leaf]}), strategy, returns=("state", role))
        with pytest.raises(StepError, match=rf"the result with role \"{role}\" has a leaf.*\['t'\]\[0\] is a {kind}"):
            run(1.0, X)

    def test_none_is_an_empty_tree(self):
        assert jdist.distribute(lambda w, b: (w, {"t": None}), TWO)(1.0, X)[1] == {"t": None}


class TestOneValueAnExample:
    """Averaging over the replicas would mix them; a vector that only looks like them may be meant."""

    def run(self, strategy, metric, **options):
        def step(w, batch):
            loss, grad = jdist.value_and_grad(lambda w: jdist.mean(w * batch["x"]))(w)
            return w - grad, {"loss": loss, "m": [metric(batch["x"])]}

        return jdist.distribute(step, strategy, **options)(1.0, {"x": np.arange(8, dtype=np.float32)})[1]["m"][0]

    @pytest.mark.parametrize("metric", [lambda x: x, lambda x: jnp.stack([x, x], 1)])
    def test_a_warning_names_the_metric_and_the_way_out(self, metric):
        for transform in ("shard_map", "pmap"):
            strategy = jdist.mirrored(["cpu:0", "cpu:1"], transform=transform)
            with pytest.warns(
                UserWarning, match=r"\['m'\]\[0\], float32\[4.*of the 4 rows.*role \"examples\".*all_reduce"
            ):
                self.run(strategy, metric)

    def test_microbatches_are_mixed_as_well(self):
        # The step is traced with a microbatch and with the whole batch.
        with pytest.warns(UserWarning, match=r"entry for each of the [48] rows") as caught:
            self.run(jdist.default(), lambda x: x, accumulate=2)
        assert any("float32[4], has one entry for each of the 4 rows" in str(w.message) for w in caught)

    def test_what_is_meant_is_said_by_all_reduce(self):
        assert self.run(TWO, lambda x: jdist.all_reduce(x[:4], "mean")).tolist() == [2, 3, 4, 5]

    @pytest.mark.parametrize("strategy", [s for s in EVERY.values() if s.num_replicas == 1 or s.transform == "jit"])
    def test_where_nothing_is_averaged_nothing_is_mixed(self, strategy):
        assert self.run(strategy, lambda x: x).tolist() == list(range(8))

    @pytest.mark.parametrize("metric", [lambda x: x[:3], lambda x: x.mean(keepdims=True), lambda x: x.mean()])
    def test_other_shapes(self, metric):
        assert self.run(TWO, metric).shape == metric(jnp.zeros(4)).shape

    def test_a_value_of_each_replica(self):
        assert self.run(TWO, jdist.PerReplica).value.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]

    def test_one_row_a_replica(self):
        run = jdist.distribute(lambda w, b: (w, b["x"]), TWO)
        assert run(1.0, {"x": np.array([1, 3], np.float32)})[1].tolist() == [2]


def test_roles_without_the_states():
    assert Traced(("metrics", "state", "examples")).output_roles == ("metrics", "examples")
