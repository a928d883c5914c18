"""Mixed precision: what is computed in 16 bits, what stays float32, and that training comes out the same."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from sklearn.datasets import load_digits

import jdist
from jdist.errors import StepError

FOUR = jax.devices()[:4]
HALF, TX = jdist.precision("bf16"), optax.adam(1e-2)
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
BOTH = pytest.mark.parametrize("name", DTYPES)


def distributed(**options):
    return jdist.distribute(train_step, jdist.one_device(), **options)


class TestTheValue:
    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: jdist.precision("bf61"), "`name` is 'bf61'; it must be 'bf16' or 'fp16'. Did you mean 'bf16'"),
            (
                lambda: jdist.precision("float32"),
                "`name` is 'float32'.*Without `precision` a step computes in the dtype of its parameters",
            ),
            (lambda: jdist.precision(16), "`name` is 16"),
            (lambda: jdist.precision("bf16", initial_scale=8.0), 'are for "fp16"'),
            (lambda: jdist.precision("bf16", keep=[3]), "`keep` has 3"),
            (lambda: distributed(precision=16), r'`precision` is 16; .*"bf16", "fp16", or a value'),
            (lambda: distributed(precision=jdist.precision("fp16"), non_finite="apply"), '"apply"` cannot go with'),
        ],
    )
    def test_what_is_refused(self, call, message):
        with pytest.raises(StepError, match=message):
            call()

    def test_what_is_taken(self):
        assert jdist.precision("bf16", keep="scale") == jdist.precision("bf16", keep=["scale"])
        step = distributed(precision="bf16", non_finite="apply")
        assert step.options.precision == jdist.precision("bf16")

    @BOTH
    def test_only_wider_floating_point_leaves_are_cast(self, name):
        half, dtype = jdist.precision(name, keep=("norm", "1")), DTYPES[name]
        stay = {
            "int": jnp.ones(2, jnp.int32),
            "bool": jnp.ones(2, bool),
            "key": jax.random.key(0),
            "complex": jnp.ones(2, complex),
            "float8": jnp.ones(2, jnp.float8_e4m3fn),
            "half": jnp.ones(2, jnp.float16),
            "norm": {"scale": jnp.ones(2)},
        }
        assert jax.tree.map(lambda x: x.dtype, half.cast_to_compute(stay)) == jax.tree.map(lambda x: x.dtype, stay)
        cast = half.cast_to_compute({"w": jnp.ones(2), "list": [np.ones(2, np.float32), jnp.ones(2), 1.5]})
        assert [x.dtype for x in (cast["w"], *cast["list"])] == [dtype, dtype, jnp.float32, dtype]
        wide = half.cast_to_output({"w": jnp.ones(2, dtype), "n": jnp.ones(2, jnp.int32), "k": jax.random.key(0)})
        assert (wide["w"].dtype, wide["n"].dtype) == (jnp.float32, jnp.int32)


SEEN: list[dict[str, str]] = []


def create():
    key = jax.random.key(0)
    params = {"w": jax.random.normal(key, (6, 8)) * 0.3, "v": jax.random.normal(key, (8, 2)) * 0.3}
    return {"params": params, "opt": TX.init(params), "mean": jnp.zeros(6), "n": jnp.int32(0)}


def train_step(state, batch):
    def loss_fn(params):
        hidden = jnp.tanh(batch["x"] @ params["w"])
        out = hidden @ params["v"]
        SEEN.append({"hidden": str(hidden.dtype), **{k: str(x.dtype) for k, x in batch.items()}})
        losses = ((out - batch["y"]) ** 2).mean(-1)
        return jdist.mean(losses, batch["mask"]), out

    (loss, out), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state["params"])
    SEEN.append({"loss": str(loss.dtype), "out": str(out.dtype), "grad": str(grads["w"].dtype)})
    updates, opt = jdist.optimizer(TX).update(grads, state["opt"], state["params"])
    new = {
        "params": optax.apply_updates(state["params"], updates),
        "opt": opt,
        "mean": 0.9 * state["mean"] + 0.1 * jdist.all_reduce(batch["x"].mean(0), "mean"),
        "n": state["n"] + 1,
    }
    return new, {
        "loss": loss,
        "x": batch["x"].mean(),
        "rows": jdist.all_reduce(jnp.ones_like(batch["x"][:, 0]).sum(), "sum"),
    }


def rows(n=8, seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, 6)).astype(np.float32), rng.normal(size=(n, 2)).astype(np.float32)
    return {"x": x, "y": y, "label": rng.integers(0, 2, n), "mask": np.arange(n) < n - 1}


class TestInAStep:
    @pytest.mark.parametrize(("name", "options"), [("bf16", {}), ("fp16", {"accumulate": 2})])
    def test_what_is_computed_in_16_bits_and_what_is_not(self, name, options):
        SEEN.clear()
        strategy = jdist.mirrored(FOUR)
        step = jdist.distribute(train_step, strategy, precision=jdist.precision(name), **options)
        state, metrics = step(strategy.init(create), rows())
        half = str(jnp.dtype(DTYPES[name]))
        assert SEEN[0] == {"hidden": half, "x": half, "y": half, "label": "int32", "mask": "bool"}
        assert SEEN[1] == {"loss": "float32", "out": "float32", "grad": "float32"}
        own = strategy.fetch(state)
        assert {str(x.dtype) for x in jax.tree.leaves(own)} == {"float32", "int32"}
        assert {k: str(x.dtype) for k, x in metrics.items()} == dict.fromkeys(("loss", "x", "rows"), "float32")
        assert float(metrics["rows"]) == 8.0  # summed over the replicas once, and not again as a metric
        assert float(metrics["x"]) == pytest.approx(rows()["x"].mean(), abs=5e-3)

    @BOTH
    def test_every_product_of_matrices_is_of_16_bits(self, name):
        step = distributed(precision=jdist.precision(name))
        text = step.lower(create(), rows()).as_text()
        dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
        assert len(dots) >= 5  # two forward, three backward
        short = name.replace("fp", "f")
        assert all(re.search(rf"tensor<\S*x{short}>, tensor<\S*x{short}>\)", line) for line in dots), dots

    def test_gradients_are_exchanged_in_float32(self):
        step = jdist.distribute(train_step, jdist.mirrored(FOUR), precision=jdist.precision("bf16"))
        lowered = step.lower(create(), rows()).as_text()
        found = re.findall(r"stablehlo.all_reduce.*?\}\) : \((.*?)\) ->", lowered, re.DOTALL)
        assert any("tensor<6x8xf32>" in types for types in found)
        assert not any("tensor<6x8xbf16>" in types for types in found)

    def test_kept_names_stay_float32_in_parameters_and_batch(self):
        SEEN.clear()
        step = distributed(precision=jdist.precision("bf16", keep=("w", "y")))
        step(create(), rows())
        assert (SEEN[0]["hidden"], SEEN[0]["x"], SEEN[0]["y"]) == ("float32", "bfloat16", "float32")

    def test_a_name_to_keep_that_nothing_has(self):
        step = distributed(precision=jdist.precision("bf16", keep="labels"))
        with pytest.raises(StepError, match=r"names 'labels'.* Did you mean 'label'"):
            step(create(), rows())

    def test_rows_and_per_replica_results_come_back_in_float32(self):
        def predict(params, batch):
            out = HALF.cast_to_compute(params)["w"].sum() * batch["x"]
            assert out.dtype == jnp.bfloat16
            return out, out.mean()

        step = jdist.distribute(predict, jdist.mirrored(FOUR), returns=("examples", "per_replica"), precision=HALF)
        out, means = step({"w": jnp.ones(2)}, rows())
        assert (out.dtype, out.shape, means.value.dtype) == (jnp.float32, (7, 6), jnp.float32)

    @BOTH
    def test_a_state_in_16_bits_is_refused(self, name):
        """Parameters that a step rounds without knowing it are not taken for those that it was given."""
        half = jdist.precision(name)

        def step(state, batch):
            w = half.cast_to_compute(state["w"])
            return {"w": w - jdist.grad(lambda w: jdist.mean(w * batch["x"]))(w)}

        with pytest.raises(StepError, match=r"\['w'\]: float32\[\] before, \w*float16\[\] after"):
            jdist.distribute(step, jdist.one_device(), precision=half)({"w": jnp.float32(1)}, rows())

    def test_a_second_call_compiles_nothing(self, compiled):
        strategy = jdist.mirrored(FOUR)
        step = jdist.distribute(train_step, strategy, precision=HALF, check_replicas=0)
        state, _ = step(strategy.init(create), rows())
        compiled.clear()
        step(state, rows(seed=1))
        assert compiled == []

    def test_without_a_strategy_nothing_is_cast(self):
        SEEN.clear()
        train_step(create(), {k: jnp.asarray(x) for k, x in rows().items()})
        assert SEEN[0]["hidden"] == "float32"

    @BOTH
    def test_several_arguments_and_other_leaves(self, name):
        """Integers get no gradient, and a parameter that is kept in 16 bits keeps its dtype."""

        def step(state, batch):
            def loss_fn(a, b, n):
                assert (a.dtype, n.dtype) == (DTYPES[name], jnp.int32)
                return (a * b["x"].astype(a.dtype)).sum() * n

            a, b = jdist.grad(loss_fn, argnums=(0, 1))(state["a"], state["b"], state["n"])
            return {"a": state["a"] - a, "b": {"x": state["b"]["x"] - b["x"]}, "n": state["n"]}

        precision = jdist.precision(name, initial_scale=8.0 if name == "fp16" else None)
        state = {"a": jnp.float32(2), "b": {"x": jnp.bfloat16(3)}, "n": jnp.int32(2)}
        new = jdist.distribute(step, jdist.one_device(), precision=precision)(state, rows())
        assert (float(new["a"]), float(new["b"]["x"]), new["b"]["x"].dtype) == (-4.0, -1.0, jnp.bfloat16)


class Small(nn.Module):
    """Convolution, batch normalisation, dense: flax's own defaults, no dtype said anywhere."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3), strides=2)(x)
        x = nn.BatchNorm(use_running_average=False, axis_name=jdist.replica_axes())(x)
        return nn.Dense(10)(nn.relu(x).reshape(x.shape[0], -1))


def train_digits(strategy, precision, epochs=6):
    digits, model = load_digits(), Small()
    arrays = {"x": digits.images[:1024, ..., None].astype(np.float32) / 16, "y": digits.target[:1024]}

    def make(key):
        variables = model.init(key, jnp.zeros((1, 8, 8, 1)))
        stats = variables["batch_stats"]
        return jdist.TrainState.create(params=variables["params"], tx=optax.adam(1e-2), batch_stats=stats)

    @jdist.distribute(strategy, precision=precision)
    def step(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.extra["batch_stats"]}
            logits, new = model.apply(variables, batch["x"], mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["y"])
            return jdist.mean(losses, batch["mask"]), (logits, new)

        (loss, (logits, new)), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state.params)
        right = jdist.mean(logits.argmax(-1) == batch["y"], batch["mask"])
        return state.apply_gradients(grads=grads, **new), {"loss": loss, "accuracy": right}

    state, found = strategy.init(make, jax.random.key(0)), []
    data = jdist.data.from_arrays(arrays, global_batch=64, shuffle_seed=0, epochs=epochs)
    for batch in strategy.distribute_dataset(data):
        state, metrics = step(state, batch)
        found.append(metrics)
    state = strategy.fetch(state)
    assert {x.dtype for x in jax.tree.leaves((state.params, state.extra))} == {np.dtype("float32")}
    last = found[-16:]
    return np.mean([m["loss"] for m in last]), np.mean([m["accuracy"] for m in last])


@pytest.mark.parametrize("name", ["bf16", pytest.param("fp16", marks=pytest.mark.full)])
def test_digits_train_to_the_loss_of_float32(name):
    strategy = jdist.mirrored(FOUR)
    loss, accuracy = train_digits(strategy, None)
    assert loss < 0.2
    np.testing.assert_allclose(train_digits(strategy, jdist.precision(name)), (loss, accuracy), atol=0.01)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(6, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.norm(self.first(x))))


def still(model, precision):
    """The parameters after a step that does not move them: not rounded."""

    @jdist.nnx.distribute(jdist.mirrored(FOUR), precision=precision)
    def step(model, batch):
        return jdist.nnx.value_and_grad(lambda model: jdist.mean(model(batch["x"]) ** 2))(model)[0]

    copy = nnx.clone(model)
    step(copy, rows(64))
    return nnx.state(copy, nnx.Param)


@pytest.mark.parametrize("name", [pytest.param("bf16", marks=pytest.mark.full), "fp16"])
def test_nnx_objects_compute_in_16_bits_and_stay_float32(name):
    def trained(precision):
        model = Net(nnx.Rngs(0))
        optimizer, seen = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), []

        @jdist.nnx.distribute(jdist.mirrored(FOUR), precision=precision)
        def step(model, optimizer, batch):
            def loss_fn(model):
                seen.append(str(model.first(batch["x"]).dtype))
                return jdist.mean((model(batch["x"]) - batch["y"]) ** 2)

            loss, grads = jdist.nnx.value_and_grad(loss_fn)(model)
            optimizer.update(model, grads)
            return {"loss": loss}

        jax.tree.map(np.testing.assert_array_equal, nnx.state(model, nnx.Param), still(model, precision))
        losses = [float(step(model, optimizer, rows(64, seed=i % 3))["loss"]) for i in range(12)]
        assert {str(x.dtype) for x in jax.tree.leaves(nnx.state(model))} == {"float32"}
        return np.array(losses), seen[0]

    (half, dtype), (full, wide) = trained(jdist.precision(name)), trained(None)
    assert (dtype, wide) == (str(jnp.dtype(DTYPES[name])), "float32")
    assert full[-1] < full[0] - 0.1
    np.testing.assert_allclose(half, full, atol=0.02)
