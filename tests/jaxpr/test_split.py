"""A step cut into its gradient part and its update part does what the whole step does, and loses nothing."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jdist
from jdist.core.context import ReplicaTrace, tracing
from jdist.errors import BoundaryError
from jdist.jaxpr.split import split

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


def in_parts(step, state, batch=BATCH, others=()):
    """Runs the phases one after another, as one microbatch on one replica, and then the update part."""
    parts = split(DEFAULT, step, state, batch, others)
    zero = jnp.int32(0)
    combined, carried, early = [], {}, {}
    for phase in parts.phases:
        prepared = jax.jit(phase.prepare)(state, others, combined)
        operands, leaves, outputs = jax.jit(phase.run)(prepared, batch, zero)
        assert [len(xs) for xs in operands] == [len(cut.shapes) for cut in phase.cuts]
        combined += [x for xs in operands for x in xs]
        carried.update(zip(phase.carried, leaves, strict=True))
        early.update(zip(phase.outputs, outputs, strict=True))
    carried = [carried[n] for n in range(len(parts.carried))]
    new_state, late = jax.jit(parts.update)(state, others, combined, carried)
    assert [x is None for x in late] == list(parts.early)
    outputs = [early[i] if x is None else x for i, x in enumerate(late)]
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


@pytest.mark.parametrize("name", STEPS)
def test_the_parts_equal_the_whole_step(name):
    step, state, carried = STEPS[name]()
    others = (jnp.float32(0.3),)
    expected_state, expected_outputs = whole(step, state, others=others)
    new_state, outputs, parts = in_parts(step, state, others=others)
    assert jax.tree.structure(new_state) == jax.tree.structure(expected_state)
    numbers = lambda tree: jax.tree.map(  # noqa: E731
        lambda x: jax.random.key_data(x) if jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key) else x, tree
    )
    for got, expected in ((new_state, expected_state), (outputs, expected_outputs)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), numbers(got), numbers(expected)
        )
    assert names(expected_state, [c.leaf for c in parts.carried]) == carried


def test_cuts_tell_how_each_array_is_combined():
    def step(w, batch, others):
        loss, grad = jdist.value_and_grad(lambda w: w * batch["y"].mean())(w)
        _, more = jdist.value_and_grad(lambda w: w * batch["y"].sum(), op="sum")(w)
        return w - grad - more, loss

    *_, parts = in_parts(step, jnp.float32(1))
    assert [(cut.collective.kind, cut.collective.op, len(cut.shapes)) for cut in parts.cuts] == [
        ("gradient", "mean", 2),
        ("gradient", "sum", 2),
    ]


def ops_of_phases(step, state=1.0):
    return [[cut.collective.op for cut in phase.cuts] for phase in split(DEFAULT, step, state, BATCH).phases]


class TestPhases:
    """As many loops over the microbatches as collectives depend on one another, and no more."""

    def test_what_depends_on_nothing_combined_shares_the_phase_of_the_gradient(self):
        def step(w, batch, others):
            loss, grad = jdist.value_and_grad(lambda w: (w * batch["y"]).mean())(w)
            return w - grad, (
                loss,
                jdist.all_reduce(batch["y"].max(), "max"),
                jdist.all_reduce(batch["mask"].sum(), "sum"),
            )

        assert ops_of_phases(step) == [["mean", "max", "sum"]]

    def test_a_masked_mean_is_counted_before(self):
        def step(w, batch, others):
            loss, grad = jdist.value_and_grad(lambda w: jdist.mean(w * batch["y"], batch["mask"]))(w)
            return w - grad, (loss, jdist.all_reduce((w * batch["y"]).max(), "max"))

        assert ops_of_phases(step) == [["sum"], ["mean", "max"]]

    def test_a_gradient_at_updated_parameters_is_a_phase_of_its_own(self):
        def step(w, batch, others):
            for _ in range(3):
                w -= jdist.grad(lambda w: (w * batch["y"]).mean() ** 2)(w)
            return w, {}

        assert ops_of_phases(step) == [["mean"], ["mean"], ["mean"]]

    def test_a_collective_in_a_function_that_the_step_calls_is_found(self):
        def step(w, batch, others):
            return w - jax.jit(jdist.grad(lambda w: jdist.mean(w * batch["y"], batch["mask"])))(w), {}

        assert ops_of_phases(step) == [["sum"], ["mean"]]

    def test_what_all_microbatches_share_is_computed_before_their_loop(self):
        def step(w, batch, others):
            doubled = jnp.sin(w)
            return w - jdist.grad(lambda v: (v * batch["y"]).mean())(doubled), {}

        (phase,) = split(DEFAULT, step, jnp.float32(1), BATCH).phases
        before = jax.make_jaxpr(phase.prepare)(jnp.float32(1), (), [])
        prepared = jax.eval_shape(phase.prepare, jnp.float32(1), (), [])
        inside = jax.make_jaxpr(phase.run)(prepared, BATCH, jnp.int32(0))
        assert "sin" in str(before)
        assert "sin" not in str(inside)


class TestRefused:
    def refuse(self, step, state, message, **options):
        with pytest.raises(BoundaryError, match=message):
            split(DEFAULT, step, state, BATCH, (), **options)

    def test_parameters_updated_by_a_gradient_of_jax(self):
        def step(params, batch, others):
            return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss_of)(params, batch)), {}

        self.refuse(step, params(), r"change `jax\.value_and_grad` to `jdist\.value_and_grad`", num_microbatches=2)

    @pytest.mark.parametrize(
        "inside",
        [
            lambda f, w: jax.lax.scan(lambda w, _: (w - f(w), None), w, None, length=2)[0],
            lambda f, w: jax.lax.cond(w > 0, f, lambda w: w, w),
            lambda f, w: jax.checkpoint(f)(w),
            lambda f, w: jax.lax.fori_loop(0, 2, lambda _, w: f(w), w),
        ],
        ids=["scan", "cond", "checkpoint", "fori_loop"],
    )
    def test_a_gradient_inside_a_function_of_the_steps_own(self, inside):
        def step(w, batch, others):
            return inside(jdist.grad(lambda w: (w * batch["y"]).mean()), w), {}

        self.refuse(
            step,
            jnp.float32(1),
            r"inside a `lax\.scan`.*cannot be split.*Call it in the step itself",
            num_microbatches=2,
        )

    @pytest.mark.parametrize(
        "rule",
        [
            lambda old, x: jnp.maximum(old, x.max()),
            lambda old, x: jnp.sqrt(old**2 + x.mean()),
        ],
    )
    def test_a_leaf_of_which_microbatches_have_no_common_value(self, rule):
        def step(state, batch, others):
            grad = jdist.grad(lambda w: (w * batch["y"]).mean())(state["w"])
            return {"w": state["w"] - grad, "own": rule(state["own"], batch["x"])}, {}

        state = {"w": jnp.float32(1), "own": jnp.float32(1)}
        self.refuse(step, state, r"computes state leaf \['own'\].*no common value", num_microbatches=2)


def test_an_error_in_the_step_itself_comes_through_as_it_is():
    with pytest.raises(KeyError, match="mine"):
        split(DEFAULT, lambda s, b, o: {}["mine"], 1.0, BATCH)
