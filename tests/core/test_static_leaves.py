"""States with leaves that are no arrays, under every strategy: Equinox models, functions, optimisers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.checkpoint.checkpointer import Checkpointer
from jdist.core.step_state import StaticLeaf, pack, unpack
from jdist.errors import StepError

eqx = pytest.importorskip("equinox")

OPTIM = optax.sgd(0.1, momentum=0.9)


class Net(eqx.Module):
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    name: str

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(4, 3, 8, 1, activation=jnp.tanh, key=key)
        self.dropout = eqx.nn.Dropout(0.0)
        self.name = "net"

    def __call__(self, x):
        return self.mlp(self.dropout(x))


def create(key):
    model = Net(key)
    return model, OPTIM.init(eqx.filter(model, eqx.is_inexact_array))


def loss_fn(model, batch):
    logits = jax.vmap(model)(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def step(state, batch):
    model, opt_state = state
    loss, grads = jdist.value_and_grad(loss_fn, using=eqx.filter_value_and_grad)(model, batch)
    updates, opt_state = OPTIM.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return (eqx.apply_updates(model, updates), opt_state), {"loss": loss}


def batches(count=3):
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(16, 4)).astype(np.float32), "y": rng.integers(0, 3, 16)} for _ in range(count)]


def plain():
    state = create(jax.random.key(0))
    for batch in batches():
        state, metrics = eqx.filter_jit(step)(state, batch)
    return state, float(metrics["loss"])


def assert_close(state, expected):
    for x, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        if isinstance(wanted, jax.Array | np.ndarray):
            np.testing.assert_allclose(np.asarray(x), np.asarray(wanted), rtol=1e-6, atol=1e-6)
        else:
            assert x is wanted or x == wanted
            assert type(x) is type(wanted)


STRATEGIES = {
    "default": jdist.default,
    "one_device": jdist.one_device,
    "mirrored": jdist.mirrored,
    "pmap": lambda: jdist.mirrored(transform="pmap"),
    "jit": lambda: jdist.mirrored(transform="jit"),
    "central_storage": jdist.central_storage,
}
every_strategy = pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)


class TestAnEquinoxModel:
    @every_strategy
    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_trains_as_it_does_alone(self, make, accumulate):
        strategy = make()
        state = strategy.init(create, jax.random.key(0))
        train_step = jdist.distribute(step, strategy, accumulate=accumulate)
        for batch in strategy.distribute_dataset(batches()):
            state, metrics = train_step(state, batch)
        strategy.check(state)
        expected, loss = plain()
        assert_close(strategy.fetch(state), expected)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-6)

    @every_strategy
    def test_is_itself_between_steps(self, make):
        strategy = make()
        state = strategy.init(create, jax.random.key(0))
        assert state[0].mlp.activation is jnp.tanh
        train_step = jdist.distribute(step, strategy)
        for batch in batches(2):
            state, _ = train_step(state, batch)
            assert train_step.last_state is state
        model = strategy.fetch(state)[0]
        assert (model.name, model.dropout.inference, model.dropout.p) == ("net", False, 0.0)
        assert jax.vmap(model)(batches(1)[0]["x"]).shape == (16, 3)

    def test_is_taken_from_the_host(self):
        train_step = jdist.distribute(step, jdist.mirrored())
        state, _ = train_step(create(jax.random.key(0)), batches(1)[0])
        assert state[0].mlp.activation is jnp.tanh

    def test_compiles_once(self):
        traces = []

        def counted(state, batch):
            traces.append(1)
            return step(state, batch)

        train_step = jdist.distribute(counted, jdist.mirrored())
        state, _ = train_step(create(jax.random.key(0)), batches(1)[0])
        first = len(traces)
        for batch in batches():
            state, _ = train_step(state, batch)
        assert len(traces) == first
        jax.block_until_ready(train_step(eqx.tree_at(lambda s: s[0].dropout.inference, state, True), batches(1)[0]))
        assert len(traces) > first

    def test_several_steps_in_a_call(self):
        strategy = jdist.mirrored()
        train_step = jdist.distribute(step, strategy, steps_per_call=3)
        state = strategy.init(create, jax.random.key(0))
        for batch in strategy.distribute_dataset(batches(), steps_per_call=3):
            state, _ = train_step(state, batch)
        assert_close(strategy.fetch(state), plain()[0])

    def test_in_half_precision(self):
        strategy = jdist.mirrored()
        train_step = jdist.distribute(step, strategy, precision=jdist.precision("fp16"))
        state = strategy.init(create, jax.random.key(0))
        losses = []
        for _ in range(10):
            for batch in batches(1):
                state, metrics = train_step(state, batch)
                losses.append(float(metrics["loss"]))
        assert losses[-1] < losses[0]
        assert strategy.fetch(state)[0].mlp.activation is jnp.tanh

    def test_with_a_compressed_all_reduce(self):
        strategy = jdist.mirrored(all_reduce=jdist.reduction.compressed(dtype="bf16"))
        train_step = jdist.distribute(step, strategy)
        state = strategy.init(create, jax.random.key(0))
        for batch in batches():
            state, _ = train_step(state, batch)
        assert strategy.fetch(state)[0].mlp.activation is jnp.tanh

    def test_on_parameter_servers(self):
        strategy = jdist.parameter_server(local_workers=1, local_ps=1)
        try:
            state = strategy.init(create, jax.random.key(0))
            train_step = jdist.distribute(step, strategy)
            for batch in batches():
                state, _ = train_step(state, batch)
                train_step.wait()
            assert_close(strategy.fetch(state), plain()[0])
        finally:
            strategy.coordinator.close()

    @every_strategy
    def test_is_saved_and_restored(self, make, tmp_path):
        strategy = make()
        train_step = jdist.distribute(step, strategy)
        state, _ = train_step(strategy.init(create, jax.random.key(0)), batches(1)[0])
        with Checkpointer(tmp_path, check=strategy.check) as checkpoints:
            checkpoints.save(1, state)
            restored = checkpoints.restore(strategy.init(create, jax.random.key(1)))
        assert restored is not None
        assert_close(strategy.fetch(restored.state), strategy.fetch(state))

    def test_with_fit(self, tmp_path):
        rows = {name: np.concatenate([batch[name] for batch in batches()]) for name in ("x", "y")}
        ema = jdist.callbacks.ema(0.5, params=lambda state: state[0])
        strategy = jdist.mirrored()
        state, _ = jdist.fit(
            step,
            strategy.init(create, jax.random.key(0)),
            rows,
            strategy=strategy,
            global_batch=16,
            epochs=2,
            callbacks=[ema, jdist.callbacks.checkpoint(tmp_path)],
        )
        assert jax.vmap(strategy.fetch(state)[0])(rows["x"]).shape == (48, 3)
        assert ema.average().mlp.activation is jnp.tanh

    def test_batch_statistics_of_equinox(self):
        class Normal(eqx.Module):
            norm: eqx.nn.BatchNorm
            out: eqx.nn.Linear

            def __init__(self, key):
                self.norm = eqx.nn.BatchNorm(4, axis_name="rows", mode="batch")
                self.out = eqx.nn.Linear(4, 3, key=key)

            def __call__(self, x, state):
                x, state = self.norm(x, state)
                return self.out(x), state

        def begin(key):
            model, statistics = eqx.nn.make_with_state(Normal)(key)
            return model, statistics, OPTIM.init(eqx.filter(model, eqx.is_inexact_array))

        def normal_step(state, batch):
            model, statistics, opt_state = state

            def loss_fn(model):
                logits, new = jax.vmap(model, axis_name="rows", in_axes=(0, None), out_axes=(0, None))(
                    batch["x"], statistics
                )
                return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), new

            (loss, new), grads = jdist.value_and_grad(loss_fn, has_aux=True, using=eqx.filter_value_and_grad)(model)
            updates, opt_state = OPTIM.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
            counts, statistics = eqx.partition(new, lambda x: jnp.issubdtype(x.dtype, jnp.integer))
            new = eqx.combine(counts, jdist.aggregate(statistics, "mean"))
            return (eqx.apply_updates(model, updates), new, opt_state), {"loss": loss}

        strategy = jdist.mirrored(jax.devices()[:2])
        train_step = jdist.distribute(normal_step, strategy)
        state, metrics = train_step(strategy.init(begin, jax.random.key(0)), batches(1)[0])
        assert np.isfinite(float(metrics["loss"]))
        strategy.check(state)


class TestFunctions:
    @every_strategy
    def test_in_a_dict(self, make):
        strategy = make()
        train_step = jdist.distribute(
            lambda state, batch: ({**state, "w": state["f"](state["w"])}, {"w": state["w"].sum()}), strategy
        )
        state = strategy.init(lambda: {"w": jnp.ones(3), "f": jnp.negative})
        state, _ = train_step(state, {"x": np.ones(8)})
        assert state["f"] is jnp.negative
        assert strategy.fetch(state)["w"].tolist() == [-1, -1, -1]

    def test_a_number_in_a_dict_is_an_array_as_ever(self):
        assert pack({"n": 3, "flag": True}) == {"n": 3, "flag": True}

    def test_an_optimiser_is_one_constant(self):
        packed = pack({"tx": OPTIM})
        assert packed["tx"] == StaticLeaf(OPTIM, type(OPTIM))
        assert unpack(packed)["tx"] is OPTIM

    def test_what_has_no_constants_stays_itself(self):
        state = {"w": jnp.ones(2)}
        assert pack(state) is state
        assert unpack(state) is state

    def test_are_no_metrics(self):
        with pytest.raises(
            StepError, match=r'the result with role "metrics" has a leaf that is not an array of numbers'
        ):
            jdist.distribute(lambda w, batch: (w, {"f": jnp.tanh}), jdist.mirrored())(jnp.ones(2), {"x": np.ones(8)})


class Counter(eqx.Module):
    count: int


def with_function(make):
    return lambda state, batch: ({**state, "f": make()}, {"loss": 0.0})


@pytest.mark.parametrize(
    ("state", "changing", "message"),
    [
        (
            {"w": np.ones(2), "f": jnp.tanh},
            with_function(lambda: jnp.sin),
            r"\['f'\]: the constant .*tanh.* before, the constant .*sin.* after",
        ),
        (
            {"w": np.ones(2), "f": lambda x: x},
            with_function(lambda: lambda x: x),
            r"\['f'\]: the constant function .* before",
        ),
        (
            Counter(0),
            lambda s, batch: (Counter(s.count + 1), {"loss": 0.0}),
            r"\.count: the constant int 0 before, the constant int 1 after(.|\n)*jnp\.asarray",
        ),
    ],
    ids=["another function", "one made anew", "a number of a module"],
)
def test_a_constant_that_a_step_changes_is_refused_by_name(state, changing, message):
    with pytest.raises(StepError, match=message):
        jdist.distribute(changing, jdist.mirrored())(state, {"x": np.ones(8)})


def test_a_constant_that_cannot_be_hashed_is_refused():
    class Unhashable:
        __hash__ = None

        def __call__(self, x):
            return x

    with pytest.raises(StepError, match=r"state leaf \['f'\] is a Unhashable that cannot be hashed"):
        jdist.mirrored().init(lambda: {"f": Unhashable()})


def test_using_takes_no_option_of_jax():
    with pytest.raises(StepError, match="`using` differentiates by the first argument"):
        jdist.value_and_grad(loss_fn, argnums=1, using=eqx.filter_value_and_grad)
