"""State that is no parameter; the example values are those of `tf.VariableAggregation`."""

import flax.linen as nn
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.errors import StepError
from tests.toys import TRANSFORMS

SINGLE = {"default": jdist.default(), "one_device": jdist.one_device()}
KEY = jax.random.key(0)


def five_and_more(how, dtype=jnp.float32):
    """To 5, replica i adds 1 + i."""
    old = jnp.array(5, dtype)
    new = old + 1 + jdist.replica_id().astype(dtype)
    return jdist.aggregate(new, how, **({"old": old} if how == "sum" else {}))


class TestAggregate:
    @pytest.mark.parametrize(("how", "expected"), [("mean", 6.5), ("sum", 8), ("first", 6), ("per_replica", [6, 7])])
    def test_every_replica_holds_the_same(self, two, how, expected):
        assert two.run(lambda: five_and_more(how)).value.tolist() == [expected, expected]

    @pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.float16])
    def test_dtypes_stay(self, two, dtype):
        for how, expected in {"sum": 8, "first": 6}.items():
            value = two.run(lambda how=how: five_and_more(how, dtype)).value
            assert (value.dtype, value.tolist()) == (dtype, [expected, expected])

    @pytest.mark.parametrize("strategy", SINGLE.values(), ids=SINGLE)
    @pytest.mark.parametrize(("how", "expected"), [("mean", 6), ("sum", 6), ("first", 6), ("per_replica", [6])])
    def test_on_one_replica_it_is_the_new_version(self, strategy, how, expected):
        (result,) = strategy.local_results(strategy.run(lambda: five_and_more(how)))
        assert result.tolist() == expected
        assert five_and_more(how).tolist() == expected

    def test_first_is_exact_for_any_leaf(self, two):
        def step():
            one = jdist.replica_id()
            x = jnp.where(one == 0, jnp.array([jnp.nan, -2.5, jnp.inf]), 1.0)
            key = jax.random.fold_in(jax.random.key(0), one)
            x, flag, first_key = jdist.aggregate((x, one == 0, key), "first")
            flags, keys = jdist.aggregate((one == 0, key), "per_replica")
            assert (flags.shape, keys.shape, keys.dtype) == ((2,), (2,), key.dtype)
            return x, flag, jax.random.key_data(first_key), flags, jax.random.key_data(keys)

        x, flag, key, flags, keys = two.run(step).value
        assert flags.tolist() == [[True, False]] * 2
        assert keys[0].tolist() == keys[1].tolist()
        assert keys[0, 0].tolist() == key[0].tolist() != keys[0, 1].tolist()
        np.testing.assert_array_equal(x[1], [np.nan, -2.5, np.inf])
        assert flag.tolist() == [True, True]
        assert key[0].tolist() == key[1].tolist()

    def test_a_reduction_that_changes_values_is_not_asked(self):
        halves = jdist.reduction.Reduction(
            "halves", lambda tree: (), lambda tree, carry, axes: (jax.tree.map(lambda x: x / 2, tree), carry)
        )
        strategy = jdist.mirrored(["cpu:0", "cpu:1"], all_reduce=halves)
        for how, expected in {"mean": 6.5, "sum": 8, "first": 6}.items():
            assert strategy.run(lambda how=how: five_and_more(how)).value.tolist() == [expected, expected]

    @pytest.mark.parametrize(
        ("new", "how", "options", "message"),
        [
            (1.0, "average", {}, "`how` is 'average'; it must be one of 'mean', 'sum', 'first', 'per_re"),
            (1.0, "sum", {}, "needs `old=`"),
            (1.0, "mean", {"old": 1.0}, r"'mean'\) takes no `old`"),
            ({"n": jnp.int32(1)}, "mean", {}, r"\['n'\] is int32, and its mean"),
        ],
    )
    def test_what_is_refused(self, new, how, options, message):
        with pytest.raises(StepError, match=message):
            jdist.aggregate(new, how, **options)

    @pytest.mark.parametrize("inside", [False, True])
    @pytest.mark.parametrize(
        ("new", "old", "message"),
        [
            (
                True,
                False,
                r"the value is bool\[\], and bool\[\] in `old`; only numbers can be added up. Count in an int",
            ),
            ({"k": KEY}, {"k": KEY}, r"leaf \['k'\] is key<fry>\[\], and key<fry>\[\] in `old`; only numbers"),
            (
                {"a": 1.0},
                {"b": 1.0},
                "`new` has the tree PyTreeDef.*'a'.*, `old` has PyTreeDef.*'b'.*; they must be alike",
            ),
            (
                {"a": np.ones(3)},
                {"a": 1.0},
                r"leaf \['a'\] is float\d\d\[3\], and float32\[\] in `old`; the shapes must",
            ),
            ("text", 1.0, r"jdist\.aggregate: the value is 'text', a str; it must be an array of numbers"),
        ],
    )
    def test_what_cannot_be_summed_is_refused_by_name(self, two, new, old, message, inside):
        with pytest.raises(StepError, match=message):
            two.run(lambda: jdist.aggregate(new, "sum", old=old)) if inside else jdist.aggregate(new, "sum", old=old)


def counting_step(state, x):
    """Counts rows and keeps a running mean of the batches' means: state that no gradient touches."""
    loss, grad = jdist.value_and_grad(lambda w: jdist.mean((w * x - 1) ** 2))(state["w"])
    return {
        "w": state["w"] - 0.01 * grad,
        "rows": jdist.aggregate(state["rows"] + x.shape[0], "sum", old=state["rows"]),
        "sum": jdist.aggregate(state["sum"] + x.sum(), "sum", old=state["sum"]),
        "mean": jdist.aggregate(0.5 * state["mean"] + 0.5 * x.mean(), "mean"),
        "step": jdist.aggregate(state["step"] + 1, "first"),
    }, {"loss": loss}


def start():
    return {"w": np.float32(0), "rows": np.int32(3), "sum": np.float32(3), "mean": np.float32(1), "step": np.int32(0)}


class TestInAStep:
    X = np.arange(8, dtype=np.float32)

    @pytest.mark.parametrize("strategy", [*TRANSFORMS.values(), *SINGLE.values()], ids=[*TRANSFORMS, *SINGLE])
    @pytest.mark.parametrize("steps_per_call", [1, 2])
    def test_plain_pytrees(self, strategy, steps_per_call):
        step = jdist.distribute(counting_step, strategy, steps_per_call=steps_per_call)
        state = start()
        for batch in [self.X, self.X] if steps_per_call == 1 else [np.stack([self.X, self.X])]:
            state, _ = step(state, batch)
        state = strategy.fetch(state)
        assert (int(state["rows"]), float(state["sum"]), int(state["step"])) == (3 + 16, 3 + 56, 2)
        assert float(state["mean"]) == 0.25 + 0.25 * 3.5 + 0.5 * 3.5

    @pytest.mark.parametrize("strategy", [*TRANSFORMS.values(), *SINGLE.values()], ids=[*TRANSFORMS, *SINGLE])
    def test_accumulate(self, strategy):
        """Each microbatch has a version, as a replica has; the step's number is the same for all."""
        state, _ = jdist.distribute(counting_step, strategy, accumulate=2)(start(), self.X)
        state = strategy.fetch(state)
        assert (float(state["sum"]), int(state["step"])) == (3 + 28, 1)
        np.testing.assert_allclose(state["mean"], 0.5 + 0.5 * self.X.mean(), rtol=1e-6)

    def test_per_replica_state_is_read_by_the_replicas_number(self, two):
        def step(counts, x):
            own = counts[jdist.replica_id()] + x.sum()
            return jdist.aggregate(own, "per_replica"), {}

        single = [(strategy, [56]) for strategy in (SINGLE["one_device"], SINGLE["default"], TRANSFORMS["jit"])]
        for strategy, expected in ((two, [6 * 2, 22 * 2]), *single):
            run = jdist.distribute(step, strategy)
            counts = np.zeros(len(expected), np.float32)
            for _ in range(2):
                counts, _ = run(counts, self.X)
            assert strategy.fetch(counts).tolist() == expected


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=False, momentum=0.5)(x))


class FlaxState(flax.training.train_state.TrainState):
    batch_stats: dict


def batch_statistics_loss(apply_fn, batch_stats, x):
    def loss_fn(params):
        out, new = apply_fn({"params": params, "batch_stats": batch_stats}, x, mutable=["batch_stats"])
        return jdist.mean(out**2), new["batch_stats"]

    return loss_fn


class TestTrainStates:
    """Batch statistics of each replica's rows, averaged; without that the replicas' states would differ."""

    X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)

    def variables(self):
        return Normed().init(jax.random.key(0), self.X)

    def expected(self):
        halves = np.split(self.X, 2)
        return {"mean": 0.5 * self.X.mean(0), "var": 0.5 + 0.5 * np.mean([half.var(0) for half in halves], 0)}

    def check(self, statistics):
        for name, expected in self.expected().items():
            np.testing.assert_allclose(statistics["BatchNorm_0"][name], expected, rtol=1e-5, atol=1e-6)

    def test_of_flax(self, two):
        def step(state, x):
            loss_fn = batch_statistics_loss(state.apply_fn, state.batch_stats, x)
            (loss, stats), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state.params)
            stats = jdist.aggregate(stats, "mean")
            return state.apply_gradients(grads=grads, batch_stats=stats), {"loss": loss}

        state = FlaxState.create(apply_fn=Normed().apply, tx=optax.sgd(0.1), **self.variables())
        self.check(two.fetch(jdist.distribute(step, two)(state, self.X)[0]).batch_stats)

    def create(self, **options):
        own = {**self.variables(), "seen": np.int32(0), "own": np.zeros(2, np.float32)}
        return jdist.TrainState.create(apply_fn=Normed().apply, tx=optax.sgd(0.1), **own, **options)

    def declared_step(self, state, x):
        loss_fn = batch_statistics_loss(state.apply_fn, state.extra["batch_stats"], x)
        (loss, stats), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state.params)
        seen, own = state.extra["seen"] + x.shape[0], state.extra["own"][jdist.replica_id()] + x[0, 0]
        return state.apply_gradients(grads=grads, batch_stats=stats, seen=seen, own=own), {"loss": loss}

    def test_of_jdist_by_declaration(self, two):
        state = self.create(aggregation={"batch_stats": "mean", "seen": "sum", "own": "per_replica"})
        state = two.fetch(jdist.distribute(self.declared_step, two)(state, self.X)[0])
        self.check(state.extra["batch_stats"])
        assert int(state.extra["seen"]) == 8
        assert state.extra["own"].tolist() == self.X[[0, 4], 0].tolist()
        assert state.replace(seen=3).extra["seen"] == 3  # nothing is aggregated outside of `apply_gradients`

    def test_undeclared_they_differ_and_are_found(self, two):
        def step(state, x):
            loss_fn = batch_statistics_loss(state.apply_fn, state.extra["batch_stats"], x)
            (loss, stats), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state.params)
            return state.apply_gradients(grads=grads, batch_stats=stats), {"loss": loss}

        with pytest.raises(jdist.errors.ReplicaDivergenceError, match="batch_stats"):
            jdist.distribute(step, two)(self.create(), self.X)

    @pytest.mark.parametrize(
        ("aggregation", "message"),
        [
            ({"sen": "sum"}, r"`aggregation` names 'sen', which is not a collection; the collections are \['seen'\]"),
            ({"seen": "total"}, "'total'"),
        ],
    )
    def test_a_declaration_is_checked(self, aggregation, message):
        with pytest.raises(StepError, match=message):
            jdist.TrainState.create(params=1.0, tx=optax.sgd(0.1), seen=0, aggregation=aggregation)


class TestFirstReplicaOnly:
    @pytest.mark.parametrize("strategy", [*TRANSFORMS.values(), *SINGLE.values()], ids=[*TRANSFORMS, *SINGLE])
    @pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=str)
    def test_a_callback_is_called_once_a_step(self, strategy, options):
        seen = []

        def step(w, x):
            loss, grad = jdist.value_and_grad(lambda w: jdist.mean(w * x))(w)
            jdist.first_replica_only(
                jax.debug.callback, lambda loss, **kw: seen.append((float(loss), kw)), loss, unit=1
            )
            return w - grad, {}

        jdist.distribute(step, strategy, **options)(np.float32(1), np.arange(4, dtype=np.float32))
        jax.effects_barrier()
        assert [loss for loss, _ in seen] == [1.5]
        assert int(seen[0][1]["unit"]) == 1

    def test_which_one(self, two):
        seen = []
        two.run(lambda: jdist.first_replica_only(jax.debug.callback, lambda i: seen.append(int(i)), jdist.replica_id()))
        jax.effects_barrier()
        assert seen == [0]

    def test_outside_a_strategy(self):
        seen = []
        jdist.first_replica_only(seen.append, 1)
        assert seen == [1]
