"""A state in parts on the devices: the numbers are one device's, and no device holds more than its part."""

import collections
import functools
import html
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist
from jdist.checkpoint.checkpointer import Checkpointer
from jdist.core.sharded_leaf import ShardedLeaf
from jdist.errors import NonFiniteError, ReplicaDivergenceError, StepError, StrategyError
from tests.by_default import some
from tests.toys import assert_close, step_of

ROWS = 120  # divides among 1, 2, 3, 5 and 8 replicas
RNG = np.random.default_rng(0)
BATCHES = [
    {
        "token": RNG.integers(37, size=ROWS),
        "y": RNG.integers(5, size=ROWS),
        "mask": np.arange(ROWS) < ROWS - 13 * (i % 2),
    }
    for i in range(4)
]
EVERYTHING = {"whole_below": 0, "most_whole": 1}


def create(tx=None, empty=True):
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "embedding": jax.random.normal(keys[0], (37, 24)) * 0.3,
        "layers": {"w": jax.random.normal(keys[1], (3, 24, 24)) * 0.2, "b": jnp.zeros((3, 24))},
        "flat": jax.random.normal(keys[2], (24, 7, 5)) * 0.2,
        "scale": jnp.ones(()),
        "few": jnp.ones(3),
    }
    if empty:
        params["none"] = jnp.zeros((0, 4))
    return jdist.TrainState.create(params=params, tx=tx or optax.sgd(0.1, momentum=0.9), rng=jax.random.key(1))


def logits(params, tokens):
    x = params["embedding"][tokens]

    def layer(x, w):
        return x + jnp.tanh(x @ w["w"] + w["b"]), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    scale = params["scale"] * params["few"].mean()
    return jnp.einsum("bi,ijk->bk", x, params["flat"]) * scale + params.get("none", jnp.zeros(0)).sum()


def train_step(state, batch):
    def loss_fn(params):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, batch["token"]), batch["y"])
        return jdist.mean(losses, batch["mask"])

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "norm": optax.tree.norm(grads)}


def run(strategy, step=train_step, make=create, num_steps=8, **options):
    distributed = jdist.distribute(step, strategy, **options)
    state, losses = strategy.init(make), []
    for i in range(num_steps):
        state, metrics = distributed(state, BATCHES[i % len(BATCHES)])
        losses.append(metrics["loss"])
    return strategy.fetch(state), np.array(losses), state


WAYS = {
    "8": {},
    "3": {"devices": jax.devices()[:3]},
    "5": {"devices": jax.devices()[:5]},
    "within 2": {"within": 2},
    "optimizer": {"shard": "optimizer"},
    "optimizer on 3": {"shard": "optimizer", "devices": jax.devices()[:3]},
    "optimizer within 4": {"shard": "optimizer", "within": 4},
}


@pytest.mark.parametrize("way", some(list(WAYS), ["5", "within 2", "optimizer on 3"]))
def test_a_hundred_steps_are_those_of_one_device(way):
    got, losses, _ = run(jdist.sharded(**WAYS[way], **EVERYTHING), num_steps=100)
    want, expected, _ = run(jdist.one_device(), num_steps=100)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)
    # Sums over replicas are made in another order, a rounding a step: 100 steps with momentum 0.9.
    assert_close(got, want, atol=5e-6)


OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(optax.cosine_decay_schedule(1e-3, 10))),
    "clipped by block": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "lamb": optax.lamb(1e-3),
    "lars": optax.lars(1e-2),
    "lion": optax.lion(1e-4),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=2),
    "muon": optax.contrib.muon(1e-3),
    "ema": optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "multi_steps": optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, key=3), optax.sgd(0.1)),
}


def create_for(name):
    return create(OPTIMIZERS[name], empty=name != "muon")  # which divides by the number of elements


@functools.cache
def on_one_device(name):
    return run(jdist.one_device(), make=functools.partial(create_for, name))[:2]


@pytest.mark.parametrize("shard", ["state", "optimizer"])
@pytest.mark.parametrize("name", some(OPTIMIZERS, ["clipped", "lamb", "adafactor", "muon", "multi_steps"]))
def test_every_optimiser_updates_parts_as_it_updates_whole_arrays(name, shard):
    make = functools.partial(create_for, name)
    got, losses, _ = run(jdist.sharded(shard=shard, **EVERYTHING), make=make)
    want, expected = on_one_device(name)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=2e-5)
    assert_close(got, want, atol=3e-5)


def test_steps_that_read_parameters_outside_of_the_boundary():
    """A norm of the parameters, a decay in the loss of another gradient, and a moving average beside the optimiser's."""

    def step(state, batch):
        norm = optax.tree.norm(state.params)

        def loss_fn(params):
            decay = sum(jnp.sum(x**2) for x in jax.tree.leaves(state.params))
            losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, batch["token"]), batch["y"])
            return jdist.mean(losses, batch["mask"]) + 1e-3 * decay + 1e-3 * optax.tree.norm(params, squared=True)

        loss, grads = jdist.value_and_grad(loss_fn)(state.params)
        grads = jax.tree.map(lambda g, p: g + 1e-2 * p / norm, grads, state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "norm": norm}

    got, losses, _ = run(jdist.sharded(**EVERYTHING), step)
    want, expected, _ = run(jdist.one_device(), step)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=2e-6)
    assert_close(got, want, atol=2e-6)


def test_gradients_that_a_later_gradient_reads():
    """Sharpness-aware minimisation: the second gradient is taken where the first one points."""

    def step(state, batch):
        def loss_fn(params):
            losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, batch["token"]), batch["y"])
            return jdist.mean(losses, batch["mask"])

        first = jdist.grad(loss_fn)(state.params)
        scale = 0.05 / optax.tree.norm(first)
        loss, grads = jdist.value_and_grad(loss_fn)(jax.tree.map(lambda p, g: p + scale * g, state.params, first))
        return state.apply_gradients(grads=grads), {"loss": loss}

    for options in ({}, {"accumulate": 5}):
        got, losses, _ = run(jdist.sharded(jax.devices()[:3], **EVERYTHING), step, **options)
        want, expected, _ = run(jdist.one_device(), step)
        np.testing.assert_allclose(losses, expected, rtol=0, atol=2e-6)
        assert_close(got, want, atol=5e-6)


def test_a_module_of_nnx_is_gathered_where_it_computes():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up, self.norm = nnx.Linear(16, 64, rngs=rngs), nnx.BatchNorm(64, rngs=rngs)
            self.dropout, self.down = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(64, 5, rngs=rngs)

        def __call__(self, x):
            return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))

    def trained(strategy):
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        @jdist.nnx.distribute(strategy)
        def step(model, optimizer, batch):
            def loss_fn(model):
                out = model(jax.nn.one_hot(batch["token"] % 16, 16))
                losses = optax.softmax_cross_entropy_with_integer_labels(out, batch["y"])
                return jdist.mean(losses, batch["mask"]), out

            (loss, _), grads = jdist.nnx.value_and_grad(loss_fn, has_aux=True)(model)
            optimizer.update(model, grads)
            return loss

        losses = [float(step(model, optimizer, batch)) for batch in BATCHES]
        text = step.lower(model, optimizer, BATCHES[0]).as_text()
        return losses, strategy.fetch(nnx.state(model, nnx.BatchStat)), text

    (losses, statistics, text), (expected, same, _) = trained(jdist.sharded(**EVERYTHING)), trained(jdist.mirrored())
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), statistics, same)
    kernels = re.findall(r"stablehlo.all_gather.*-> tensor<(?:16x64|64x5|320)xf32>", text)
    assert len(kernels) >= 3  # two for the forward pass, and that of the last layer for the backward pass


def loss_of(params, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, batch["token"]), batch["y"])
    return jdist.mean(losses, batch["mask"])


def ensemble(state, batch):
    """Members of a stack whose shape is cut on another axis than theirs."""

    def member(w, b):
        def loss_fn(w, b):
            return jdist.mean(jnp.tanh(w[batch["token"] % 24] + b).sum(-1) ** 2, batch["mask"])

        return jdist.value_and_grad(loss_fn, argnums=(0, 1))(w, b)

    loss, (w, b) = jax.vmap(member)(state.params["layers"]["w"], state.params["layers"]["b"])
    grads = {**jax.tree.map(jnp.zeros_like, state.params), "layers": {"w": w, "b": b}}
    return state.apply_gradients(grads=grads), {"loss": loss.mean()}


def curvature(state, batch):
    """A product with the Hessian."""
    loss, grads = jdist.value_and_grad(loss_of)(state.params, batch)
    _, product = jax.jvp(jdist.grad(lambda params: loss_of(params, batch)), (state.params,), (grads,))
    return state.apply_gradients(grads=jax.tree.map(lambda g, h: g + 0.1 * h, grads, product)), {"loss": loss}


def gradient_in_gradient(state, batch):
    """The gradient of the loss after a step."""

    def after_a_step(params):
        grads = jdist.grad(loss_of)(params, batch)
        return loss_of(jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), batch)

    loss, grads = jdist.value_and_grad(after_a_step)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def inner_steps(state, batch):
    """A gradient by parameters that a loop over gradients has made."""

    def descend(params, _):
        grads = jdist.grad(loss_of)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), None

    params, _ = jax.lax.scan(descend, state.params, None, length=2)
    loss, grads = jdist.value_and_grad(loss_of)(params, batch)
    return state.apply_gradients(grads=grads), {"loss": loss}


def other_tree(state, batch):
    """What takes the gradient returns it in a list."""

    def using(fun, has_aux):
        def value_and_grads(params):
            value, grads = jax.value_and_grad(fun)(params)
            return value, jax.tree.leaves(grads)

        return value_and_grads

    loss, grads = jdist.value_and_grad(lambda params: loss_of(params, batch), using=using)(state.params)
    grads = jax.tree.unflatten(jax.tree.structure(state.params), grads)
    return state.apply_gradients(grads=grads), {"loss": loss}


@pytest.mark.parametrize("step", [ensemble, curvature, gradient_in_gradient, inner_steps, other_tree])
def test_gradients_under_transformations(step):
    got, losses, _ = run(jdist.sharded(jax.devices()[:3], **EVERYTHING), step, num_steps=3)
    want, expected, _ = run(jdist.one_device(), step, num_steps=3)
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    assert_close(got, want, atol=2e-6)


def test_a_gradient_by_what_each_replica_made_of_its_rows():
    """Each replica's own weights, of which there is no whole array: the mean of the gradients, as on mirrored."""

    def step(state, batch):
        own = jax.grad(lambda p: logits(p, batch["token"]).mean())(state.params)
        loss, grads = jdist.value_and_grad(loss_of)(jax.tree.map(lambda p, g: p - g, state.params, own), batch)
        return state.apply_gradients(grads=grads), {"loss": loss}

    got, losses, _ = run(jdist.sharded(jax.devices()[:3], **EVERYTHING), step, num_steps=3)
    want, expected, _ = run(jdist.mirrored(jax.devices()[:3]), step, num_steps=3)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=2e-6)
    assert_close(got, want, atol=2e-6)


@pytest.mark.parametrize("accumulate", [1, 5])
def test_a_state_that_a_loss_computes_of_parameters_alone(accumulate):
    """A step of a power iteration, and a count, which as a metric would be none of rows."""

    def step(state, batch):
        def loss_fn(params):
            row = params["embedding"] @ state.extra["direction"]
            num_positive = (params["embedding"] > 0).sum()
            return loss_of(params, batch) / jnp.linalg.norm(row), (params["embedding"].T @ row, num_positive)

        (loss, (new, num_positive)), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, direction=new / jnp.linalg.norm(new), positive=num_positive)
        return state, {"loss": loss, "positive": num_positive}

    def make():
        return create().replace(extra={"direction": jnp.ones(24) / 5, "positive": 0})

    got, losses, _ = run(jdist.sharded(jax.devices()[:3], **EVERYTHING), step, make, 3, accumulate=accumulate)
    want, expected, _ = run(jdist.one_device(), step, make, 3)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=2e-6)
    assert_close(got, want, atol=2e-6)


def test_every_process_would_gather_in_the_same_order():
    """A set's order follows from addresses in memory, which no two processes share."""

    @functools.partial(step_of, rate=1.0)
    def step(params, batch):
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jdist.mean((x**2).sum(-1), batch["mask"])

    state = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 12
    batch = {"x": np.ones((24, 16), np.float32), "mask": np.ones(24, bool)}
    programs = {
        jdist.distribute(step, jdist.sharded(jax.devices()[:2], **EVERYTHING)).lower(state, batch).as_text()
        for _ in range(3)
    }
    assert len(programs) == 1


@pytest.mark.parametrize("shard", ["state", "optimizer"])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_sum_over_one_of_two_axes_counts_the_replicas_of_a_group(axis, shard):
    strategy = jdist.sharded(jax.devices()[:6], within=2, shard=shard, **EVERYTHING)

    def step(w, batch):
        _, grad = jdist.value_and_grad(lambda w: (batch["x"] @ w).mean())(w)
        axes = jdist.replica_axes()[axis]
        own = jax.lax.pmean(batch["x"].sum(), axes)
        return w - jax.lax.pmean(grad, axes) - jax.lax.psum(jnp.zeros(4) + 1, axes), {"own": own}

    x = np.arange(48, dtype=np.float32).reshape(12, 4)
    state, metrics = jdist.distribute(step, strategy)(strategy.init(lambda: jnp.zeros(4)), {"x": x})
    np.testing.assert_allclose(strategy.fetch(state), -x.mean(0) - (3, 2)[axis], rtol=1e-6)
    np.testing.assert_allclose(metrics["own"], x.sum() / 6, rtol=1e-6)


class TestWhereThingsAre:
    @pytest.mark.parametrize("within", [None, 4])
    def test_a_device_holds_its_part(self, within):
        strategy = jdist.sharded(within=within, whole_below=24)
        state = strategy.init(lambda: create(optax.adam(1e-3)))
        state, _ = jdist.distribute(train_step, strategy)(state, BATCHES[0])
        report = strategy.report(state)
        n = within or 8
        assert report.bytes_per_device <= (1 / n + 0.02) * report.num_bytes
        held = collections.Counter()
        for leaf in jax.tree.leaves(state):
            leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
            for shard in leaf.addressable_shards:
                held[shard.device] += shard.data.nbytes
        assert set(held.values()) == {report.bytes_per_device}
        assert strategy.report(jax.eval_shape(lambda: create(optax.adam(1e-3)))) == report

    def test_only_the_optimiser_is_in_parts(self):
        strategy = jdist.sharded(shard="optimizer", whole_below=24)
        state = strategy.init(lambda: create(optax.adam(1e-3)))
        whole = jax.tree.leaves(state.params, is_leaf=lambda x: isinstance(x, ShardedLeaf))
        assert all(x.sharding == strategy.replicated_sharding for x in whole)
        assert isinstance(state.opt_state[0].mu["flat"], ShardedLeaf)
        state, _ = jdist.distribute(train_step, strategy)(state, BATCHES[0])
        assert isinstance(state.opt_state[0].mu["flat"], ShardedLeaf)
        assert state.params["flat"].sharding == strategy.replicated_sharding

    def test_it_shows_what_it_is(self):
        strategy = jdist.sharded(whole_below=24)
        state = strategy.init(create)
        kept = "in 8 parts over replica: [24, 1, 5] each, stored as [24, 8, 5]"
        assert repr(state.params["flat"]) == f"ShardedLeaf(float32[24, 7, 5] {kept}; strategy.fetch gives the array)"
        text = str(strategy.report(state))
        assert re.search(
            r"params\['layers'\]\['w'\] +float32\[3, 24, 24\] +6,912  in 8 parts over replica: \[3, 3, 24\] each +864\n",
            text,
        )
        assert "whole on each of 8 devices: fewer than 24 elements" in text
        assert "whole on each of 8 devices: a PRNG key" in text
        assert "<table" in strategy.report(state)._repr_html_()

    def test_no_device_holds_a_leaf_whole_while_the_state_is_made(self, monkeypatch):
        needs, jit = [], jax.jit

        def spied(function, **options):
            jitted = jit(function, **options)
            if function.__name__ != "in_parts":
                return jitted

            def call(*args):
                compiled = jitted.lower(*args).compile()
                needs.append(compiled.memory_analysis())
                return compiled(*args)

            return call

        def make(key):
            return {
                "w": jax.random.normal(key, (1024, 1024)),
                "b": jnp.zeros((512, 1024)),
                "n": jnp.zeros((), jnp.int32),
            }

        strategy = jdist.sharded()
        monkeypatch.setattr(jax, "jit", spied)
        state = strategy.init(make, jax.random.key(0))
        np.testing.assert_array_equal(strategy.fetch(state)["w"], make(jax.random.key(0))["w"])
        (need,) = needs
        assert need.output_size_in_bytes <= (4 << 20) / 8 + (2 << 20) / 8 + 4096
        assert need.temp_size_in_bytes < 2 << 20  # of 4 MB of random numbers each device makes its own


def collectives(strategy, **options):
    text = (
        jdist.distribute(train_step, strategy, **options).lower(jax.eval_shape(create), BATCHES[0]).compile().as_text()
    )
    return collections.Counter(re.findall(r" (all-gather|reduce-scatter|all-reduce|all-to-all)(?:-start)?\(", text))


class TestCollectives:
    LEAVES = 4  # in parts: embedding, w, b, flat

    @pytest.mark.parametrize("accumulate", [1, 5])
    def test_of_the_optimisers_state_one_reduce_scatter_and_one_all_gather_an_update(self, accumulate):
        strategy = jdist.sharded(jax.devices()[:3], shard="optimizer", whole_below=24)
        found = collectives(strategy, accumulate=accumulate)
        assert found["reduce-scatter"] == found["all-gather"] == self.LEAVES

    @pytest.mark.parametrize("accumulate", [1, 5])
    def test_of_the_state_at_most_two_all_gathers_a_leaf_and_microbatch(self, accumulate):
        strategy = jdist.sharded(jax.devices()[:3], whole_below=24)
        found = collectives(strategy, accumulate=accumulate)
        # Once in the program, of layers in the scan's body, with the loop over microbatches around all of it.
        assert found["reduce-scatter"] == self.LEAVES
        assert found["all-gather"] <= 2 * self.LEAVES

    def test_layers_are_gathered_one_by_one(self):
        step = jdist.distribute(train_step, jdist.sharded(whole_below=24))
        text = step.lower(jax.eval_shape(create), BATCHES[0]).as_text()
        gathered = re.findall(r"all_gather.*-> tensor<([\dx]*)xf32>", text)
        assert "24x24" in gathered
        assert "3x24x24" not in gathered

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_the_backward_pass_gathers_again(self, dtype):
        @step_of
        def step(params, batch):
            x = batch["x"].astype(dtype)
            for w in params:
                x = jnp.tanh(x @ w.astype(dtype))
            return x.astype("float32").mean()

        state = jdist.TrainState.create(params=[jnp.ones((64, 64))] * 6, tx=optax.sgd(0.1))
        strategy = jdist.sharded()
        text = jdist.distribute(step, strategy).lower(state, {"x": np.ones((16, 64), np.float32)}).as_text()
        assert len(re.findall(r"stablehlo\.all_gather", text)) == 6 + 5  # the first layer's input has no gradient

    def test_gradients_of_a_cast_are_summed_in_the_parameters_dtype_of_half_the_bytes(self):
        step = jdist.distribute(train_step, jdist.sharded(whole_below=24), precision=jdist.precision("bf16"))
        text = step.lower(jax.eval_shape(create), BATCHES[0]).as_text()
        gathered = re.findall(r"all_gather.*-> tensor<[\dx]*x(\w+)>", text)
        assert set(gathered) == {"bf16"}
        assert len(re.findall(r"all_to_all.*-> tensor<[\dx]*xbf16>", text)) == self.LEAVES


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda: jdist.sharded(within=3),
                "`within` is 3; it must divide the number of replicas, 8: one of 1, 2, 4, 8",
            ),
            (lambda: jdist.sharded(within=True), "`within` is True"),
            (lambda: jdist.sharded(shard="params"), "`shard` is 'params'; it must be 'state' or 'optimizer'"),
            (lambda: jdist.sharded(whole_below=-1), "`whole_below` is -1; it must be a whole number, 0 or more"),
            (lambda: jdist.sharded(most_whole=2), "`most_whole` is 2; it must be a share"),
            (lambda: jdist.mirrored(shard={"wihtin": 2}), "no option 'wihtin'. Did you mean 'within'"),
            (lambda: jdist.mirrored(shard="state", transform="jit"), 'takes transform="shard_map"'),
            (lambda: jdist.mirrored(shard="state", all_reduce="ring"), "`all_reduce` is ring"),
            (lambda: jdist.make_strategy("sharded", withn=2), "no option 'withn'. Did you mean 'within'"),
        ],
    )
    def test_options(self, make, message):
        with pytest.raises(StrategyError, match=re.escape(message)):
            make()

    def test_too_much_left_whole(self):
        state = {"many": [jnp.zeros(1000)] * 300, "one": jnp.zeros((1000, 100))}
        message = (
            r"75.0% of the state's 1,600,000 bytes would stay whole.*\['many'\]\[0\] \(4,000 bytes\).*`most_whole=0.75`"
        )
        with pytest.raises(StepError, match=message):
            jdist.sharded().init(lambda: state)
        report = jdist.sharded().report(state)
        assert re.search(rf"\n  Refused: {message}", str(report))
        assert report.refusal in html.unescape(report._repr_html_())
        assert jdist.sharded(whole_below=0).report(state).refusal is None
        jdist.sharded(most_whole=0.75).init(lambda: state)
        jdist.sharded(whole_below=0).init(lambda: state)

    def test_an_optimiser_that_cannot_be_told_apart(self):
        with pytest.warns(UserWarning, match=r'shard="optimizer" .*\[\'w\'\], .*Rename the field'):
            jdist.sharded(shard="optimizer").init(lambda: {"w": jnp.zeros((1000, 300))})

    def test_a_collective_over_a_name_that_is_not_the_whole_mesh(self):
        strategy = jdist.sharded(within=4)
        with pytest.raises(NameError, match="replica"):
            strategy.run(lambda: jax.lax.psum(1.0, "replica"))
        assert strategy.run(lambda: jax.lax.psum(1.0, jdist.replica_axes())).value.tolist() == [8.0] * 8


class TestChecks:
    def test_copies_that_differ_between_groups_are_found(self):
        strategy = jdist.sharded(within=4, whole_below=24)
        state = strategy.init(create)
        leaf = state.params["flat"].stored
        shards = [np.array(shard.data) for shard in leaf.addressable_shards]
        shards[5][0] += 1
        placed = [jax.device_put(x, s.device) for x, s in zip(shards, leaf.addressable_shards, strict=True)]
        other = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, placed)
        state.params["flat"] = ShardedLeaf(other, (24, 7, 5))
        with pytest.raises(
            ReplicaDivergenceError, match=r"params\['flat'\], part 1: replicas \[1, 5\] differ"
        ) as caught:
            strategy.check(state)
        assert caught.value.replicas == ((1, 5),)

    def test_a_forgotten_sum_is_found(self):
        def step(state, batch):
            grads = jax.grad(lambda p: logits(p, batch["token"]).mean())(state.params)
            return state.apply_gradients(grads=grads), {"loss": 0.0}

        strategy = jdist.sharded(whole_below=24)
        with pytest.raises((ReplicaDivergenceError, StepError)):
            run(strategy, step, check_replicas=1)

    def test_a_gradient_that_is_not_finite_is_named(self):
        step = step_of(lambda p, batch: jnp.log(-jnp.abs(p["flat"])).mean())

        strategy = jdist.sharded(whole_below=24)
        with pytest.raises(NonFiniteError, match=r"the loss|\['flat'\]"):
            run(strategy, step)


SIZES = [1, 2, 3, 5, 8]


def strategy_of(name):
    kind, _, size = name.partition(" ")
    devices = jax.devices()[: int(size)]
    make = {
        "sharded": jdist.sharded,
        "optimizer": jdist.sharded,
        "mirrored": jdist.mirrored,
        "central": jdist.central_storage,
    }
    options = {"sharded": EVERYTHING, "optimizer": {"shard": "optimizer", **EVERYTHING}}.get(kind, {})
    return make[kind](devices, **options)


# From each number of devices to the next, and back.
NEXT = list(zip(SIZES, [*SIZES[1:], SIZES[0]], strict=True))
PAIRS = [(f"sharded {n}", f"sharded {m}") for n, m in [*NEXT, *((m, n) for n, m in NEXT), (5, 5)]] + [
    ("sharded 8", "mirrored 2"),
    ("mirrored 2", "sharded 5"),
    ("sharded 3", "central 4"),
    ("central 4", "sharded 3"),
    ("central 4", "mirrored 2"),
    ("sharded 8", "optimizer 5"),
    ("optimizer 5", "sharded 2"),
]


@pytest.mark.parametrize(("saved", "restored"), PAIRS)
def test_a_checkpoint_is_restored_to_the_bit(saved, restored, tmp_path):
    before, after = strategy_of(saved), strategy_of(restored)
    tx = optax.adam(1e-2)
    state = before.init(lambda: create(tx))
    state = jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x + jnp.asarray(0.25, x.dtype), state
    )
    want = before.fetch(state)
    with Checkpointer(tmp_path, check=before.check) as checkpointer:
        checkpointer.save(3, state)
        checkpointer.wait()
        got = checkpointer.restore(after.init(lambda: create(tx))).state
    assert_close(after.fetch(got), want, atol=0)
    assert after.report(got) == after.report(after.init(lambda: create(tx)))


@pytest.mark.parametrize("name", ["sharded 5", "optimizer 3", "mirrored 2", "central 4"])
def test_a_checkpoint_is_restored_by_shapes_alone(name, tmp_path):
    strategy = strategy_of(name)
    tx = optax.adam(1e-2)
    state = strategy.init(lambda: create(tx))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state)
        checkpointer.wait()
        got = checkpointer.restore(strategy.shapes(jax.eval_shape(lambda: create(tx)))).state
    assert [x.sharding for x in jax.tree.leaves(got)] == [x.sharding for x in jax.tree.leaves(state)]
    assert_close(strategy.fetch(got), strategy.fetch(state), atol=0)


def halved_until_small(x):
    return jax.lax.while_loop(lambda c: (jnp.abs(c) > 0.1).any(), lambda c: c * 0.5, x)


@pytest.mark.parametrize(
    "of_batch",
    [halved_until_small, lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)],
    ids=["a loop without a derivative", "a callback"],
)
@pytest.mark.parametrize("in_scan", [False, True])
def test_nothing_is_differentiated_by_the_batch(of_batch, in_scan):
    def create():
        return jdist.TrainState.create(params={"w": jnp.full((2, 6, 6), 0.1)}, tx=optax.sgd(0.1))

    @step_of
    def step(params, batch):
        def layer(x, w):
            return x @ w + (of_batch(batch["x"]) if in_scan else 0), None

        x, _ = jax.lax.scan(layer, batch["x"], params["w"])
        return jdist.mean((x + of_batch(batch["x"])).sum(-1) ** 2)

    batch = {"x": RNG.normal(size=(24, 6)).astype(np.float32)}
    results = []
    for strategy in (jdist.sharded(jax.devices()[:3], **EVERYTHING), jdist.mirrored(jax.devices()[:3])):
        state, metrics = jdist.distribute(step, strategy)(strategy.init(create), batch)
        results.append((float(metrics["loss"]), strategy.fetch(state).params["w"]))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-6)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-5)


def test_an_evaluation_of_stacked_layers_gathers_one_at_a_time():
    layers, width = 8, 256

    def evaluate(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["w"])
        return {"mean": x.mean()}

    strategy = jdist.sharded()
    state = strategy.init(lambda: {"w": jnp.ones((layers, width, width))})
    step = jdist.distribute(evaluate, strategy, returns="metrics")
    compiled = step.lower(state, {"x": np.ones((8, width), np.float32)}).compile()
    stack = layers * width * width * 4
    assert compiled.memory_analysis().temp_size_in_bytes < stack / 2
