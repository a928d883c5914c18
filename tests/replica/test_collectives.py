"""What a step may call: outside a strategy, on each replica, and in the global view."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import jdist
from jdist.errors import GlobalViewError, StepError
from tests.toys import DEVICES, TRANSFORMS

ONE_EACH = jdist.one_device()
PER_REPLICA = {name: TRANSFORMS[name] for name in ("shard_map", "pmap")}
GLOBAL = TRANSFORMS["jit"]
EIGHT = jdist.mirrored()


def each(fn, batch, strategy=PER_REPLICA["shard_map"]):
    """Each replica's own `fn(its slice)`, stacked."""
    step = jdist.distribute(fn, strategy, args=("batch",), returns="per_replica")
    return jax.tree.map(np.asarray, step(batch).value)


def whole(fn, batch, strategy=GLOBAL):
    """`fn` in a step that sees the whole batch."""
    return jax.tree.map(np.asarray, jdist.distribute(fn, strategy, args=("batch",))(batch))


@pytest.fixture(params=["shard_map", "pmap"])
def strategy(request):
    return PER_REPLICA[request.param]


def test_the_maximum_of_what_holds_nan_is_nan(strategy):
    rows = np.array([[np.nan, 1.0], [2.0, 3.0]], np.float32)
    got = each(lambda x: {op: jdist.all_reduce(x[0], op) for op in ("max", "min")}, rows, strategy)
    np.testing.assert_array_equal(got["max"], [[np.nan, 3], [np.nan, 3]])
    np.testing.assert_array_equal(got["min"], [[np.nan, 1], [np.nan, 1]])


def test_a_mean_in_float16_does_not_overflow(strategy):
    assert each(lambda x: jdist.all_reduce(x[0]), np.full(2, 40000, np.float16), strategy).tolist() == [40000, 40000]


def test_outside_a_strategy_every_call_is_plain_jax():
    key, x = jax.random.key(3), jnp.arange(4.0)
    assert jdist.replica_axes() is None
    assert jdist.num_replicas() == 1
    assert jdist.replica_id().dtype == jnp.int32
    assert int(jdist.replica_id()) == 0
    assert jdist.replica_rng(key) is key
    assert jdist.all_gather(x) is x
    assert jdist.broadcast(x, source=3).tolist() == x.tolist()
    for op in ("mean", "sum", "max", "min"):
        assert jdist.all_reduce({"a": x}, op)["a"] is x
    assert float(jdist.mean(x)) == 1.5
    loss, grads = jax.jit(jdist.value_and_grad(lambda w: (w * x).sum()))(2.0)
    assert (float(loss), float(grads)) == (12.0, 6.0)
    assert float(jdist.grad(lambda w: w**2, op="sum")(3.0)) == 6.0


def test_a_scope_alone_binds_no_axis():
    with EIGHT.scope():
        assert jdist.replica_axes() is None
        assert jdist.num_replicas() == 1
        assert float(jdist.all_reduce(jnp.float32(3), "sum")) == 3.0


def test_every_call_on_each_replica(strategy):
    rows = np.array([[1.0, 1.0], [3.0, 5.0]], np.float32)

    def calls(x):
        assert jdist.replica_axes() == ("replica",)
        assert jdist.num_replicas() == 2
        tree = {"a": x[0], "b": [x[0] * 10]}
        carry, _ = jax.lax.scan(lambda c, _: (c + jdist.all_reduce(x[0, 0], "sum"), None), 0.0, None, length=2)
        return {
            "id": jdist.replica_id(),
            **{op: jdist.all_reduce(tree, op) for op in ("mean", "sum", "max", "min")},
            "int mean": jdist.all_reduce(x[0, 0].astype(jnp.int32)),
            "bool": {op: jdist.all_reduce(jdist.replica_id() == 0, op) for op in ("mean", "sum", "max", "min")},
            "gather": jdist.all_gather(x),
            "gather last": jdist.all_gather(x, axis=-1),
            "broadcast": {source: jdist.broadcast(tree, source) for source in (0, 1)},
            "scan": carry,
            "cond": jax.lax.cond(True, lambda y: jdist.all_reduce(y, "mean"), lambda y: y, x[0, 0]),
            "jit": jax.jit(lambda y: jdist.all_reduce(y, "sum"))(x[0, 0]),
        }

    got = each(calls, rows, strategy)
    both = lambda value: [value, value]  # noqa: E731
    assert got["id"].tolist() == [0, 1]
    for op, expected in {"mean": [2, 3], "sum": [4, 6], "max": [3, 5], "min": [1, 1]}.items():
        assert got[op]["a"].tolist() == both(expected)
        assert got[op]["b"][0].tolist() == both([10 * v for v in expected])
    assert got["int mean"].tolist() == both(2.0)
    assert got["int mean"].dtype == np.float32
    assert got["bool"]["max"].tolist() == both(True)
    assert got["bool"]["min"].tolist() == both(False)
    assert got["bool"]["mean"].tolist() == both(0.5)
    assert got["bool"]["sum"].tolist() == both(1)
    assert got["gather"].tolist() == both(rows.tolist())
    assert got["gather last"].tolist() == both([[1, 1, 3, 5]])
    for source in (0, 1):
        assert got["broadcast"][source]["a"].tolist() == both(rows[source].tolist())
        assert got["broadcast"][source]["b"][0].tolist() == both((10 * rows[source]).tolist())
    assert got["scan"].tolist() == both(8.0)
    assert got["cond"].tolist() == both(2.0)
    assert got["jit"].tolist() == both(4.0)


def test_all_reduce_and_all_gather_are_differentiable(strategy):
    def gradients(x):
        c = x[0]  # 1 on replica 0, 3 on replica 1
        return {
            "sum": jax.grad(lambda y: jdist.all_reduce(y, "sum") * c)(1.0),
            "mean": jax.grad(lambda y: jdist.all_reduce(y, "mean") * c)(1.0),
            "gather": jax.grad(lambda y: (jdist.all_gather(y) * jnp.arange(2.0)).sum() * c)(x),
            "broadcast": jax.grad(lambda y: jdist.broadcast(y, 1) * c)(1.0),
        }

    got = each(gradients, np.array([1.0, 3.0], np.float32), strategy)
    assert got["sum"].tolist() == [4.0, 4.0]
    assert got["mean"].tolist() == [2.0, 2.0]
    assert got["gather"].tolist() == [[0.0], [4.0]]
    assert got["broadcast"].tolist() == [0.0, 4.0]


def test_all_reduce_of_nested_trees_and_its_gradient_in_scan_and_cond(strategy):
    """Of 1 and 3 the sum is 4 and the mean 2; where replica i multiplies by c = 1, 3 the gradients are 4 and 2."""

    def gradients(x):
        c = x[0]

        def direct(tree, op):
            reduced = jdist.all_reduce({"a": [tree["a"][0] * c], "b": (tree["b"],)}, op)
            return reduced["a"][0] + reduced["b"][0] * c

        def scanned(tree, op):
            body = lambda total, y: (total + jdist.all_reduce({"y": y}, op)["y"] * c, None)  # noqa: E731
            return jax.lax.scan(body, 0.0, jnp.stack([tree["b"], tree["b"]]))[0]

        def branched(tree, op):
            return jax.lax.cond(tree["b"] > 0, lambda y: jdist.all_reduce([y], op)[0] * c, lambda y: y, tree["b"])

        at = {"a": [jnp.float32(1)], "b": jnp.float32(1)}
        ops = ("sum", "mean")
        return {
            "value": {op: jdist.all_reduce({"x": [c, (c * 10,)]}, op) for op in (*ops, "max", "min")},
            **{f.__name__: {op: jax.grad(f)(at, op) for op in ops} for f in (direct, scanned, branched)},
        }

    got = each(gradients, np.array([1.0, 3.0], np.float32), strategy)
    for op, expected in {"sum": 4, "mean": 2, "max": 3, "min": 1}.items():
        one, (ten,) = got["value"][op]["x"]
        assert (one.tolist(), ten.tolist()) == ([expected] * 2, [10 * expected] * 2)
    for op, expected in {"sum": 4.0, "mean": 2.0}.items():
        # d/da: the cotangent is 1 on each replica, so their sum is 2 (mean 1), and then the replica's own c.
        assert got["direct"][op]["a"][0].tolist() == [expected / 2, expected / 2 * 3]
        assert got["direct"][op]["b"].tolist() == [expected, expected]
        assert got["scanned"][op]["b"].tolist() == [2 * expected, 2 * expected]
        assert got["branched"][op]["b"].tolist() == [expected, expected]


@pytest.mark.parametrize("strategy", [jdist.default(), ONE_EACH, *PER_REPLICA.values(), GLOBAL])
def test_all_reduce_gives_the_same_dtypes_everywhere(strategy):
    values = {"int": 3, "bool": True, "byte": np.uint8(3), "half": jnp.bfloat16(3), "float": 3.0}
    floats = {"half": jnp.bfloat16, "float": jnp.float32}
    expected = {
        "mean": {"int": jnp.float32, "bool": jnp.float32, "byte": jnp.float32, **floats},
        "sum": {"int": jnp.int32, "bool": jnp.int32, "byte": jnp.uint8, **floats},
        "max": {"int": jnp.int32, "bool": jnp.bool_, "byte": jnp.uint8, **floats},
        "min": {"int": jnp.int32, "bool": jnp.bool_, "byte": jnp.uint8, **floats},
    }
    found = {}

    def step(x):
        for op in expected if strategy is not GLOBAL else expected.keys() - {"sum"}:  # which that view refuses
            found[op] = jax.tree.map(lambda x: x.dtype, jdist.all_reduce(values, op))
        return {}

    jdist.distribute(step, strategy, args=("batch",))(np.zeros(2))
    assert found == {op: expected[op] for op in found}
    for op in expected:  # and outside of a strategy
        assert jax.tree.map(lambda x: x.dtype, jdist.all_reduce(values, op)) == expected[op]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: jdist.all_reduce({"a": "text"}),
            r"jdist\.all_reduce: leaf \['a'\] is 'text', a str; it must be an array",
        ),
        (lambda: jdist.all_reduce(1.0, "average"), "`op` is 'average'; it must be one of 'mean'"),
        (
            lambda: jdist.all_reduce(jax.random.key(0), "sum"),
            r"all_reduce: the value is key<fry>\[\], PRNG keys, which have no",
        ),
        (lambda: jdist.all_reduce(1j, "max"), r"all_reduce: the value is complex64\[\]; complex numbers have no order"),
        (lambda: jdist.all_gather(jnp.ones(2), axis=None), r"jdist\.all_gather: `axis` is None; it must be an int"),
        (lambda: jdist.all_gather({"a": 1.0}), r"leaf \['a'\] has shape \(\) and no axis 0.*x\[None\]"),
        (lambda: jdist.all_gather(jnp.ones(2), axis=1), r"leaf value has shape \(2,\) and no axis 1"),
        (lambda: jdist.broadcast(["text"]), r"jdist\.broadcast: leaf \[0\] is 'text', a str"),
        *[
            (
                lambda source=source: jdist.broadcast(1.0, source),
                r"broadcast: `source` is .*; it must be a whole number( from 0 to 1|, 0 or more)",
            )
            for source in (-1, None, 0.0, True, "first")
        ],
        (lambda: jdist.all_gather(["text"]), r"jdist\.all_gather: leaf \[0\] is 'text', a str"),
        (lambda: jdist.mean(None), r"jdist\.mean: `per_example` is None, a NoneType; it must be an array of numbers"),
        (lambda: jdist.mean(jnp.ones(1), "text"), r"jdist\.mean: `mask` is 'text', a str"),
    ],
)
def test_what_cannot_be_reduced_is_refused_by_name(call, message, inside):
    with pytest.raises(StepError, match=message):
        PER_REPLICA["shard_map"].run(call) if inside else call()


def test_broadcast_takes_the_version_of_one_replica_whatever_the_others_hold(strategy):
    def versions(x):
        values = {"nan": x[0], "flag": x[0] > 2, "byte": x[0].astype(jnp.uint8), "half": x[0].astype(jnp.bfloat16)}
        key = jdist.replica_rng(jax.random.key(0))
        return {**jdist.broadcast(values, np.int64(1)), "key": jax.random.key_data(jdist.broadcast(key, 1))}

    got = each(versions, np.array([np.nan, 3.0], np.float32), strategy)
    expected = {"nan": np.float32, "flag": np.bool_, "byte": np.uint8, "half": jnp.bfloat16}
    assert {name: (got[name].dtype, got[name].tolist()) for name in expected} == {
        name: (np.dtype(dtype), [dtype(3)] * 2 if dtype != np.bool_ else [True, True])
        for name, dtype in expected.items()
    }
    np.testing.assert_array_equal(got["key"], [jax.random.key_data(jax.random.fold_in(jax.random.key(0), 1))] * 2)


def test_broadcast_refuses_a_replica_that_does_not_exist():
    with pytest.raises(StepError, match=r"`source` is 2; it must be a whole number from 0 to 1"):
        PER_REPLICA["shard_map"].run(lambda: jdist.broadcast(1.0, 2))


def test_all_gather_takes_numpys_integers():
    gathered = PER_REPLICA["shard_map"].run(lambda: jdist.all_gather(jnp.ones((1, 3)), axis=np.int64(-1)))
    assert gathered.value.shape == (2, 1, 6)


class TestGlobalView:
    @pytest.mark.parametrize(
        ("call", "expected"),
        [
            (lambda x: jdist.num_replicas(), 1),
            (lambda x: jdist.replica_id(), 0),
            (lambda x: jdist.all_gather(x), [1, 2, 3, 4]),
            (lambda x: jdist.all_reduce(x, "sum"), [1, 2, 3, 4]),
            (lambda x: jdist.broadcast(x, 1), [1, 2, 3, 4]),
            (lambda x: jdist.value_and_grad(lambda w: w * x.sum(), op="sum")(1.0), [10, 10]),
        ],
        ids=["num_replicas", "replica_id", "all_gather", "all_reduce", "broadcast", "value_and_grad"],
    )
    def test_it_is_one_replica(self, call, expected):
        got = whole(call, np.arange(1, 5, dtype=np.float32))
        assert np.stack(jax.tree.leaves(got)).squeeze().tolist() == expected

    def test_there_is_one_version_of_what_differs(self):
        assert whole(lambda x: {"a": jdist.PerReplica(x.sum())}, np.ones(4, np.float32))["a"].value.tolist() == [4]
        assert each(lambda x: x.sum(), np.ones(4, np.float32), GLOBAL).tolist() == [4]

    def test_run_is_refused(self):
        with pytest.raises(GlobalViewError, match=r"strategy\.run has no meaning"):
            GLOBAL.run(lambda: 1)

    def test_what_is_whole_already_passes_through(self):
        def step(x):
            assert jdist.replica_axes() is None
            key = jax.random.key(0)
            loss, grad = jdist.value_and_grad(lambda w: jdist.mean(w * x, x > 1))(2.0)
            same = jax.random.key_data(jdist.replica_rng(key)) == jax.random.key_data(key)
            return {
                "mean": jdist.all_reduce(x.mean()),
                "max": jdist.all_reduce(x.max(), "max"),
                "loss": loss,
                "grad": grad,
                "same key": same.all(),
            }

        got = whole(step, np.array([1, 2, 3, 4], np.float32))
        expected = {"mean": 2.5, "max": 4, "loss": 6, "grad": 3, "same key": 1}
        assert {k: float(v) for k, v in got.items()} == pytest.approx(expected)


class TestMean:
    """13 real rows of 16 over 8 replicas: two replicas hold padding, one of them nothing else."""

    x = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    y = np.random.default_rng(1).normal(size=16).astype(np.float32)
    mask = np.arange(16) < 13
    w = jnp.array([0.3, -1.0, 2.0])

    def losses(self, w, batch):
        return (batch["x"] @ w - batch["y"]) ** 2

    def truth(self):
        real = {"x": self.x[:13], "y": self.y[:13]}
        return jax.value_and_grad(lambda w: self.losses(w, real).mean())(self.w)

    def over_8(self, reduce_losses, w=None):
        def step(batch, w):
            return jdist.value_and_grad(lambda w: reduce_losses(self.losses(w, batch), batch["mask"]))(w)

        run = jdist.distribute(step, EIGHT, args=("batch", "replicated"))
        return run({"x": self.x, "y": self.y, "mask": self.mask}, self.w)

    def test_gradient_equals_the_unpadded_one(self):
        loss, grad = self.over_8(jdist.mean)
        np.testing.assert_allclose(loss, self.truth()[0], rtol=1e-6)
        np.testing.assert_allclose(grad, self.truth()[1], rtol=1e-6)

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda losses, mask: losses.mean(),
            lambda losses, mask: jnp.where(mask, losses, 0).sum() / jnp.maximum(mask.sum(), 1),
        ],
        ids=["padding counted", "mean of masked means"],
    )
    def test_what_people_write_instead_is_off(self, wrong):
        assert np.abs(self.over_8(wrong)[1] - self.truth()[1]).max() > 0.01

    def test_float_weights(self):
        loss, grad = self.over_8(lambda losses, mask: jdist.mean(losses, mask * 2.5))
        np.testing.assert_allclose(grad, self.truth()[1], rtol=1e-6)
        np.testing.assert_allclose(loss, self.truth()[0], rtol=1e-6)

    def test_a_mask_of_rows_for_values_of_rows_and_tokens(self):
        tokens = jnp.array([[1.0, 3.0], [5.0, 7.0], [100.0, 100.0]])
        assert float(jdist.mean(tokens, jnp.array([True, True, False]))) == 4.0
        assert float(jdist.mean(tokens, jnp.array([[1, 1], [0, 1], [0, 0]], bool))) == pytest.approx(11 / 3)
        assert float(jdist.mean(tokens, jnp.array([1.0, 3.0, 0.0]))) == pytest.approx((4 + 36) / 8)

    def test_nothing_counts(self):
        value, grad = jax.value_and_grad(lambda w: jdist.mean(w * jnp.ones(3), jnp.zeros(3, bool)))(2.0)
        assert (float(value), float(grad)) == (0.0, 0.0)
        got = each(lambda b: jdist.mean(b["x"], b["mask"]), {"x": np.ones(4), "mask": np.zeros(4, bool)})
        assert got.tolist() == [0.0, 0.0]

    def test_an_infinite_loss_on_padding_or_of_weight_zero_stays_out(self):
        assert float(jdist.mean(jnp.array([1.0, jnp.inf, jnp.nan]), jnp.array([True, False, False]))) == 1.0
        assert float(jdist.mean(jnp.array([1.0, jnp.inf]), jnp.array([1.0, 0.0]))) == 1.0

    def test_result_is_float32_or_wider(self):
        assert jdist.mean(jnp.ones(4, jnp.bfloat16)).dtype == jnp.float32
        assert jdist.mean(jnp.array([1, 2]), jnp.array([True, True])).dtype == jnp.float32
        assert float(jdist.mean(jnp.array([True, False, True]))) == pytest.approx(2 / 3)
        # 257 ones do not fit into bfloat16's 8 bits: neither the sum nor the count may be kept in it
        ones = jnp.ones(300, jnp.bfloat16)
        assert float(jdist.mean(ones, jnp.ones(300, bool))) == 1.0
        assert float(jdist.mean(ones, ones)) == 1.0

    @pytest.mark.parametrize("shape", [(2,), (3, 1), (3, 2, 1)])
    def test_a_mask_of_another_shape_is_refused(self, shape):
        with pytest.raises(StepError) as caught:
            jdist.mean(jnp.ones((3, 2)), jnp.ones(shape, bool))
        assert f"`mask` has shape {shape}" in str(caught.value)
        assert "`per_example` has shape (3, 2)" in str(caught.value)

    def test_weights_get_the_gradient_of_the_quotient(self):
        grad = jax.grad(lambda m: jdist.mean(jnp.array([2.0, 4.0]), m))(jnp.array([1.0, 1.0]))
        assert grad.tolist() == [(2 - 3) / 2, (4 - 3) / 2]

        def step(batch, w):
            return jdist.value_and_grad(lambda w: jdist.mean(self.losses(w, batch), jnp.exp(batch["x"] @ w)))(w)

        def weighted(w):
            batch = {"x": self.x, "y": self.y}
            weights = jnp.exp(self.x @ w)
            return (self.losses(w, batch) * weights).sum() / weights.sum()

        got = jdist.distribute(step, EIGHT, args=("batch", "replicated"))({"x": self.x, "y": self.y}, self.w)
        for a, b in zip(got, jax.value_and_grad(weighted)(self.w), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


class TestValueAndGrad:
    def test_argnums_and_aux(self, strategy):
        def step(x):
            f = lambda a, b, k: (a * b * x.sum() * k, {"x": x.sum()})  # noqa: E731
            (value, aux), (da, db) = jdist.value_and_grad(f, argnums=(0, 1), has_aux=True)(2.0, 3.0, k=1.0)
            grads, aux2 = jdist.grad(f, argnums=1, has_aux=True)(2.0, 3.0, k=1.0)
            return value, aux, da, db, grads, aux2

        value, aux, da, db, grads, aux2 = each(step, np.array([1, 3], np.float32), strategy)
        assert value.tolist() == [12, 12]
        assert (da.tolist(), db.tolist(), grads.tolist()) == ([6, 6], [4, 4], [4, 4])
        assert aux["x"].tolist() == aux2["x"].tolist() == [1, 3]  # aux stays the replica's own

    def test_sum(self, strategy):
        step = lambda x: jdist.value_and_grad(lambda w: w * x.sum() / 4, op="sum")(1.0)  # noqa: E731
        value, grad = each(step, np.array([1, 2, 3, 4], np.float32), strategy)
        assert value.tolist() == grad.tolist() == [2.5, 2.5]

    def test_integer_parameters(self, strategy):
        def step(x):
            params = {"w": jnp.float32(2), "n": jnp.int32(3)}
            _, grads = jdist.value_and_grad(lambda p: p["w"] * p["n"] * x.sum(), allow_int=True)(params)
            assert grads["n"].dtype == jax.dtypes.float0
            return grads["w"]

        assert each(step, np.array([1, 3], np.float32), strategy).tolist() == [6, 6]

    def test_holomorphic(self):
        got = each(lambda x: jdist.grad(lambda w: w**2 * x.sum(), holomorphic=True)(1.0 + 1.0j), np.array([1.0, 3.0]))
        np.testing.assert_allclose(got, [4 + 4j, 4 + 4j])

    @pytest.mark.parametrize(
        ("loss", "options", "message"),
        [
            (lambda w: w * jnp.ones(3), {}, r"the loss has shape \(3,\), it must be a scalar.*jdist\.mean"),
            (lambda w: (w * jnp.ones(1), None), {"has_aux": True}, r"the loss has shape \(1,\)"),
            (lambda w: (w > 0).sum(), {}, "the loss is int32, which has no gradient.*has_aux"),
            (lambda w: w, {"has_aux": True}, "has_aux"),
            (lambda w: (w, {"a": w}), {}, "has_aux"),
            (lambda w: w, {"op": "average"}, "`op` is 'average'; it must be 'mean'"),
        ],
    )
    def test_what_is_refused(self, loss, options, message):
        for gradient in (jdist.value_and_grad, jdist.grad):
            with pytest.raises(StepError, match=message):
                gradient(loss, **options)(1.0)

    def test_inside_scan_cond_and_checkpoint(self):
        def step(x):
            vg = jdist.value_and_grad(lambda w: jdist.mean((w * x) ** 2))

            def descend(w, _):
                loss, grad = vg(w)
                return w - 0.01 * grad, loss

            w, losses = jax.lax.scan(descend, 1.0, None, length=3)
            w2 = jax.lax.cond(True, lambda: descend(1.0, None)[0], lambda: 0.0)
            loss = jax.checkpoint(lambda w: vg(w)[0])(1.0)
            return w, losses, w2, loss

        x = np.array([1, 2, 3, 4], np.float32)
        w, losses, w2, loss = each(step, x)
        expected, wants = 1.0, []
        for _ in range(3):
            wants.append(expected**2 * 7.5)
            expected -= 0.01 * 2 * expected * 7.5
        np.testing.assert_allclose(w, [expected] * 2, rtol=1e-6)
        np.testing.assert_allclose(losses, [wants] * 2, rtol=1e-6)
        np.testing.assert_allclose(w2, [0.85] * 2, rtol=1e-6)
        np.testing.assert_allclose(loss, [7.5] * 2, rtol=1e-6)

    @pytest.mark.parametrize("transform", ["shard_map", "pmap"])
    def test_of_each_example_is_jaxs_own(self, transform):
        """Averaged over the replicas before it is clipped, a gradient would be nobody's."""
        for gradient in (jdist.grad, jdist.value_and_grad):
            with pytest.raises(StepError, match=r"over examples.*`jax\.vmap\(jax\.grad\(loss_fn\), \(None, 0\)\)`"):
                each(
                    lambda x: jax.vmap(gradient(lambda w, x: w * x), (None, 0))(2.0, x),  # noqa: B023
                    np.ones(4, np.float32),
                    PER_REPLICA[transform],
                )

    def test_under_vmap_of_the_users_own(self):
        def step(x):
            return jax.vmap(lambda w: jdist.value_and_grad(lambda w: w * x.sum())(w)[1])(jnp.arange(3.0))

        assert each(step, np.array([1, 3], np.float32)).tolist() == [[2, 2, 2]] * 2


class TestReplicaRng:
    def test_differs_by_replica_and_repeats(self, strategy):
        step = lambda x: jax.random.normal(jdist.replica_rng(jax.random.key(0)), (4,))  # noqa: E731
        first, second = each(step, np.ones(2), strategy)
        assert not np.isclose(first, second).any()
        assert each(step, np.ones(2), strategy).tolist() == [first.tolist(), second.tolist()]

    def test_an_array_of_keys(self, strategy):
        keys = jax.random.split(jax.random.key(0), (2, 3))
        got = each(lambda x: jax.random.key_data(jdist.replica_rng(keys)), np.ones(2), strategy)
        assert got.shape == (2, 2, 3, 2)
        assert len({tuple(key) for key in got.reshape(-1, 2).tolist()}) == 12

    @pytest.mark.parametrize("strategy", [jdist.default(), ONE_EACH, jdist.mirrored(["cpu:1"])], ids=lambda s: s.name)
    @pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3)], ids=["new", "legacy"])
    def test_with_one_replica_it_is_the_key_itself(self, strategy, key):
        """So that one device draws what plain JAX draws."""
        draw = each(lambda x: jax.random.normal(jdist.replica_rng(key), (4,)), np.ones(2), strategy)
        np.testing.assert_allclose(draw, [jax.random.normal(key, (4,))], rtol=1e-6)

    @pytest.mark.parametrize("strategy", [PER_REPLICA["shard_map"], GLOBAL], ids=lambda s: s.transform)
    def test_differs_by_microbatch_under_accumulate(self, strategy):
        def step(w, batch):
            noise = jax.random.normal(jdist.replica_rng(jax.random.key(0)), batch["x"].shape)
            _, grad = jdist.value_and_grad(lambda w: w * jdist.mean(noise))(w)
            return w - grad, noise

        run = jdist.distribute(step, strategy, accumulate=2, returns=("state", "examples"))
        w, noise = run(0.0, {"x": np.ones(8, np.float32)})
        assert len(set(np.asarray(noise).tolist())) == 8
        np.testing.assert_allclose(w, -np.mean(noise), rtol=1e-5)


def test_axes_of_the_users_own_are_not_taken_for_replicas():
    def step(x):
        inner = jax.vmap(lambda y: (jdist.num_replicas() * y, jdist.all_reduce(y, "sum")), axis_name="replicas")
        assert jax.vmap(lambda y: jdist.replica_axes() == ("replica",) and y, axis_name="mine")(x) is not None
        return inner(x)

    count, total = each(step, np.array([[1.0], [3.0]], np.float32).repeat(2, 1).reshape(4))
    assert count.tolist() == [[2, 2], [6, 6]]
    assert total.tolist() == [[4, 4], [4, 4]]


def test_a_shard_map_of_the_users_own_binds_no_replica_axis():
    mesh = Mesh(np.array(jax.devices()[:2]), ("mine",), axis_types=(AxisType.Auto,))

    def body(x):
        assert jdist.replica_axes() is None
        assert jdist.num_replicas() == 1
        return jdist.all_reduce(x, "sum")

    spec = PartitionSpec("mine")
    with EIGHT.scope():
        mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
        assert jax.jit(mapped)(jnp.arange(2.0)).tolist() == [0.0, 1.0]


def test_one_device_binds_its_axis_so_that_collectives_of_your_own_run():
    def step(x):
        assert jdist.replica_axes() == ("replica",)
        return jax.lax.psum(x, "replica"), jnp.int32(jdist.num_replicas()), jdist.replica_id()

    total, count, number = each(step, np.ones(2, np.float32), ONE_EACH)
    assert total.tolist() == [[1, 1]]
    assert (count.tolist(), number.tolist()) == ([1], [0])


def test_a_python_number_per_replica():
    assert each(lambda x: jdist.num_replicas(), np.ones(2)).tolist() == [2, 2]


def own(x):
    return x.sum() > 3  # differs between the replicas


def total(x):
    return jdist.all_reduce(x.sum(), "sum")


@jax.custom_vjp
def chosen(x):
    return jax.lax.cond(own(x), total, lambda x: 0.0, x)


chosen.defvjp(lambda x: (chosen(x), None), lambda _, cotangent: (None,))
# What some replicas would wait for, by what decides of it.
WAITING = {
    "cond": lambda w, x: jax.lax.cond(own(x), total, lambda x: 0.0, x),
    "switch": lambda w, x: jax.lax.switch(x[0].astype(int), [total, total, lambda x: 0.0], x),
    "rounds": lambda w, x: jax.lax.while_loop(lambda n: n < x.sum(), lambda n: n + 1 + 0 * total(n), 0.0),
    "rounds by their result": lambda w, x: jax.lax.while_loop(
        lambda c: c[0] < 9, lambda c: (c[0] + x.sum(), total(c[0])), (0.0, 0.0)
    )[1],
    "JAX's": lambda w, x: jax.lax.cond(own(x), lambda: jax.lax.psum(x.sum(), jdist.replica_axes()), lambda: 0.0),
    "scan": lambda w, x: jax.lax.scan(lambda c, y: (c + chosen(y[None]), None), 0.0, x)[0],
    "jit and checkpoint": lambda w, x: jax.jit(jax.checkpoint(chosen))(x),
    "gradient": lambda w, x: jax.lax.cond(own(x), jdist.grad(lambda w: (w * x).mean()), lambda w: 0.0, w),
    "gather": lambda w, x: jax.lax.cond(own(x), lambda: jdist.all_gather(x).sum(), lambda: 0.0),
}
DECIDED_ALIKE = {
    "combined": lambda w, x: jax.lax.cond(total(x) > 3, total, lambda x: 0.0, x),
    "state": lambda w, x: jax.lax.cond(w > 3, lambda x: 0.0, total, x),
    "rounds": lambda w, x: jax.lax.fori_loop(0, 1, lambda _, n: n + total(x), 0.0),
    "combined rounds": lambda w, x: jax.lax.while_loop(lambda n: n < 3, lambda n: n + total(x), 0.0),
    "nothing to wait for": lambda w, x: total(jax.lax.cond(own(x), lambda: x, lambda: x)),
}


def decided(call, strategy, accumulate=1):
    def step(w, x):
        grad = jdist.grad(lambda w: (w * x).mean())(w)
        return w - grad, {"it": call(w, x)}

    batch = np.arange(4, dtype=np.float32)
    state = strategy.init(lambda: jnp.float32(1))
    return float(jdist.distribute(step, strategy, accumulate=accumulate)(state, batch)[1]["it"])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["mirrored", "pmap", "sharded", "central_storage"])
def test_what_a_replicas_own_rows_decide_to_call_is_refused(name, accumulate):
    strategy = jdist.mirrored(DEVICES, transform="pmap") if name == "pmap" else getattr(jdist, name)(DEVICES)
    for case, call in WAITING.items():
        kind = "while_loop" if "rounds" in case else "cond` or `lax.switch"
        with pytest.raises(StepError, match=rf"inside a `lax\.{kind}` with a condition on a replica's own rows"):
            decided(call, strategy, accumulate)
    for call in DECIDED_ALIKE.values() if accumulate == 1 else ():
        assert decided(call, strategy) == 6


def test_one_replica_waits_for_nobody():
    for strategy in (jdist.one_device(), jdist.mirrored(DEVICES, transform="jit")):
        for call in DECIDED_ALIKE.values():
            assert decided(call, strategy) == 6
        for name in ("cond", "scan"):
            decided(WAITING[name], strategy)


def test_run_refuses_it_too():
    with pytest.raises(StepError, match=r"inside a `lax\.cond`"):
        jdist.mirrored(DEVICES).run(chosen, jdist.PerReplica(np.arange(8, dtype=np.float32).reshape(2, 4)))
