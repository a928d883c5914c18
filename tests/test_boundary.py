"""A step cut into its gradient part and its update part does what the whole step does, and loses nothing."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jdist
from jdist.boundary import split
from jdist.context import ReplicaTrace, tracing
from jdist.errors import BoundaryError

DEFAULT = jdist.default()
BATCH = {
    "x": np.random.default_rng(0).normal(size=(6, 4, 4, 1)).astype(np.float32),
    "y": np.array([0, 1, 1, 0, 1, 0], np.float32),
    "mask": np.array([1, 1, 1, 1, 1, 0], bool),
}


def norm(tree):
    return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree)))


def whole(step, state, batch=BATCH, others=()):
    with tracing(ReplicaTrace(DEFAULT)):
        return jax.jit(step)(state, batch, others)


def in_parts(step, state, batch=BATCH, others=(), at="gradient"):
    """Runs the parts one after another, as one microbatch on one replica."""
    parts = split(DEFAULT, step, state, batch, others, at=at)
    zero = jnp.int32(0)
    with tracing(ReplicaTrace(DEFAULT)):
        counts = jax.jit(parts.counts)(state, batch, others, zero)
        cuts, carried, crossing, early = jax.jit(parts.gradients)(state, batch, others, zero, counts)
        new_state, late = jax.jit(parts.update)(state, others, cuts, carried, crossing)
    assert len(cuts) == len(parts.cuts)
    assert len(carried) == len(parts.carried)
    assert len(crossing) == len(parts.crossing)
    assert all((a is None) != (b is None) for a, b in zip(early, late, strict=True))
    outputs = [b if a is None else a for a, b in zip(early, late, strict=True)]
    return (
        jax.tree.unflatten(parts.state_treedef, new_state),
        jax.tree.unflatten(parts.outputs_treedef, outputs),
        parts,
    )


def names(state, indices):
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return {paths[i] for i in indices}


def loss_of(params, batch):
    logits = batch["x"].reshape(len(batch["y"]), -1) @ params["w"] + params["b"]
    return jdist.mean(optax.sigmoid_binary_cross_entropy(logits, batch["y"]), batch["mask"])


def params():
    return {"w": jnp.linspace(-1, 1, 16), "b": jnp.float32(0.1)}


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(2, (3, 3))(x)
        x = nn.BatchNorm(use_running_average=not train, axis_name=jdist.replica_axes())(x)
        return nn.Dense(1)(nn.relu(x).mean((1, 2)))[:, 0]


def cnn_with_batch_norm():
    model = CNN()
    variables = jax.jit(model.init, static_argnums=2)(jax.random.key(0), BATCH["x"], False)
    state = jdist.TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=optax.sgd(0.1, momentum=0.9),
        batch_stats=variables["batch_stats"],
    )

    def step(state, batch, others):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.extra["batch_stats"]}
            logits, new = state.apply_fn(variables, batch["x"], True, mutable=["batch_stats"])
            losses = optax.sigmoid_binary_cross_entropy(logits, batch["y"])
            return jdist.mean(losses, batch["mask"]), (new["batch_stats"], logits)

        (loss, (stats, logits)), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state.params)
        metrics = {"loss": loss, "accuracy": jdist.mean((logits > 0) == batch["y"], batch["mask"])}
        return state.apply_gradients(grads=grads, batch_stats=stats), metrics

    return step, state, {".extra['batch_stats']['BatchNorm_0']['mean']", ".extra['batch_stats']['BatchNorm_0']['var']"}


def gan():
    """Two flax TrainStates; the generator is trained against the discriminator as it came in."""
    make = lambda tx: TrainState.create(apply_fn=None, params=params(), tx=tx)  # noqa: E731

    def step(state, batch, others):
        def fool(g, d):
            return -loss_of(jax.tree.map(lambda a, b: a * b, g, d), batch)

        d_loss, d_grads = jdist.value_and_grad(lambda p: loss_of(p, batch))(state["d"].params)
        g_loss, g_grads = jdist.value_and_grad(fool)(state["g"].params, state["d"].params)
        new = {"d": state["d"].apply_gradients(grads=d_grads), "g": state["g"].apply_gradients(grads=g_grads)}
        return new, {"d": d_loss, "g": g_loss}

    return step, {"d": make(optax.sgd(0.1)), "g": make(optax.adam(0.1))}, set()


def raw_optax():
    tx = jdist.optimizer(optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(0.1)))

    def step(state, batch, others):
        loss, grads = jdist.value_and_grad(loss_of)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        new_params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": loss, "grad_norm": norm(grads), "norm": norm(new_params)}
        return {"params": new_params, "opt": opt}, metrics

    return step, {"params": params(), "opt": tx.init(params())}, set()


def written_after_the_update():
    """An average of the new parameters, random keys, counters, and what was logged, in one state."""
    state = jdist.TrainState.create(
        params=params(),
        tx=optax.sgd(0.1),
        rng=jax.random.key(0),
        ema=params(),
        examples_seen=jnp.int32(0),
        rows_seen=jnp.int32(0),
        best=jnp.float32(9.0),
        constant=jnp.arange(3.0),
    )

    def step(state, batch, others):
        rng, noise = jax.random.split(state.rng)
        noisy = jax.tree.map(lambda p: p + 0.01 * jax.random.normal(noise, p.shape), state.params)
        loss, grads = jdist.value_and_grad(loss_of)(noisy, batch)
        new = state.apply_gradients(grads=grads)
        ema = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, state.extra["ema"], new.params)
        new = new.replace(
            rng=rng,
            ema=ema,
            examples_seen=state.extra["examples_seen"] + batch["mask"].sum(),
            rows_seen=state.extra["rows_seen"] + batch["y"].shape[0],
            best=jnp.minimum(state.extra["best"], loss),
        )
        return new, {"loss": loss, "ema": norm(ema), "lr": others[0], "step": state.step, "pi": 3.0}

    return step, state, {".extra['examples_seen']"}


STEPS = {f.__name__: f for f in (cnn_with_batch_norm, gan, raw_optax, written_after_the_update)}


@pytest.mark.parametrize("at", ["gradient", "update"])
@pytest.mark.parametrize("name", STEPS)
def test_the_parts_equal_the_whole_step(name, at):
    step, state, carried = STEPS[name]()
    others = (jnp.float32(0.3),)
    expected_state, expected_outputs = whole(step, state, others=others)
    new_state, outputs, parts = in_parts(step, state, others=others, at=at)
    assert jax.tree.structure(new_state) == jax.tree.structure(expected_state)
    numbers = lambda tree: jax.tree.map(  # noqa: E731
        lambda x: jax.random.key_data(x) if jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key) else x, tree
    )
    for got, expected in ((new_state, expected_state), (outputs, expected_outputs)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), numbers(got), numbers(expected)
        )
    if at == "update" and name == "written_after_the_update":
        carried = carried | {".extra['best']"}  # the loss is known there before any optimiser is called
    assert names(expected_state, parts.carried) == carried


def test_what_crosses_is_told_with_the_result_that_needs_it():
    step, state, _ = raw_optax()

    def also(state, batch, others):
        new, metrics = step(state, batch, others)
        return new, {**metrics, "per_norm": batch["y"].sum() / metrics["norm"]}

    *_, parts = in_parts(also, state)
    assert len(parts.crossing) == 1
    assert "per_norm" in parts.crossing[0]
    *_, parts = in_parts(step, state)
    assert parts.crossing == ()


def test_cuts_tell_how_each_array_is_combined():
    def step(w, batch, others):
        loss, grad = jdist.value_and_grad(lambda w: w * batch["y"].mean())(w)
        _, more = jdist.value_and_grad(lambda w: w * batch["y"].sum(), op="sum")(w)
        return w - grad - more, loss

    *_, parts = in_parts(step, jnp.float32(1))
    assert parts.cuts == ("mean", "mean", "sum", "sum")


class TestRefused:
    def refuse(self, step, state, message, at="gradient"):
        with pytest.raises(BoundaryError, match=message):
            split(DEFAULT, step, state, BATCH, (), at=at)

    @pytest.mark.parametrize("at", ["gradient", "update"])
    def test_a_generator_trained_against_the_new_discriminator(self, at):
        _, state, _ = gan()

        def step(state, batch, others):
            _, d_grads = jdist.value_and_grad(lambda p: loss_of(p, batch))(state["d"].params)
            d = state["d"].apply_gradients(grads=d_grads)
            fool = lambda g: -loss_of(jax.tree.map(lambda a, b: a * b, g, d.params), batch)  # noqa: E731
            _, g_grads = jdist.value_and_grad(fool)(state["g"].params)
            return {"d": d, "g": state["g"].apply_gradients(grads=g_grads)}, {}

        self.refuse(step, state, "gradient number 2 of the step depends on an earlier gradient of", at)

    def test_two_updates_one_after_the_other(self):
        def step(w, batch, others):
            for _ in range(2):
                w -= jdist.grad(lambda w: (w * batch["y"]).sum() ** 2)(w)
            return w, {}

        self.refuse(step, jnp.float32(1), "gradient number 2")

    def test_a_mean_of_what_was_updated(self):
        def step(w, batch, others):
            w -= jdist.grad(lambda w: (w * batch["y"]).sum())(w)
            return w, jdist.mean(batch["y"], w * batch["mask"])

        self.refuse(step, jnp.float32(1), "a masked mean of the step depends on")

    def test_no_gradient_at_all(self):
        self.refuse(lambda s, b, o: (s, {}), 1.0, r"calls `jdist\.value_and_grad` or `jdist\.grad` nowhere")
        self.refuse(
            lambda s, b, o: (s - jax.grad(lambda w: w**2)(s), {}),
            1.0,
            r"Change `jax\.value_and_grad` to `jdist\.value_and_grad`",
        )

    def test_a_mean_alone_is_no_gradient(self):
        self.refuse(lambda s, b, o: (s, jdist.mean(b["y"], b["mask"])), 1.0, "nowhere")

    def test_no_optimiser_marked(self):
        tx = optax.sgd(0.1)

        def step(state, batch, others):
            grads = jdist.grad(loss_of)(state["params"], batch)
            updates, opt = tx.update(grads, state["opt"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

        self.refuse(
            step, {"params": params(), "opt": tx.init(params())}, r"Change `tx` to `jdist\.optimizer\(tx\)`", "update"
        )

    @pytest.mark.parametrize(
        "inside",
        [
            lambda f, w: jax.lax.scan(lambda w, _: (w - f(w), None), w, None, length=2)[0],
            lambda f, w: jax.lax.cond(w > 0, f, lambda w: w, w),
            lambda f, w: jax.jit(f)(w),
            lambda f, w: jax.checkpoint(f)(w),
            lambda f, w: jax.vmap(f)(w[None])[0],
            lambda f, w: jax.lax.fori_loop(0, 2, lambda _, w: f(w), w),
        ],
        ids=["scan", "cond", "jit", "checkpoint", "vmap", "fori_loop"],
    )
    def test_a_gradient_inside_a_function_of_the_steps_own(self, inside):
        def step(w, batch, others):
            return inside(jdist.grad(lambda w: (w * batch["y"]).mean()), w), {}

        self.refuse(step, jnp.float32(1), r"inside a `lax\.scan`.*cannot be split.*Call it in the step itself")


def test_an_error_in_the_step_itself_comes_through_as_it_is():
    with pytest.raises(KeyError, match="mine"):
        split(DEFAULT, lambda s, b, o: {}["mine"], 1.0, BATCH)


class Outer(TrainState):
    inner: Any = None


def test_a_train_state_within_another_is_split_as_well():
    inner = TrainState.create(apply_fn=None, params=params(), tx=optax.sgd(0.1))
    state = Outer.create(apply_fn=None, params=params(), tx=optax.sgd(0.1), inner=inner)

    def step(state, batch, others):
        grads = jdist.grad(loss_of)(state.params, batch)
        inner_grads = jdist.grad(loss_of)(state.inner.params, batch)
        return state.apply_gradients(grads=grads).replace(inner=state.inner.apply_gradients(grads=inner_grads)), {}

    *_, parts = in_parts(step, state, at="update")
    assert names(state, parts.carried) == set()


def test_optimisers_are_marked_for_the_split_only():
    step, state, _ = gan()
    new_state, *_ = in_parts(step, state, at="update")
    assert new_state["d"].tx is state["d"].tx
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
