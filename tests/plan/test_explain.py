"""What a step does, from its compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist
from jdist.errors import StepError

BATCH = {"x": np.ones((16, 64), np.float32)}


def create():
    return jdist.TrainState.create(params={"w": jnp.ones((64, 512)), "b": jnp.zeros(512)}, tx=optax.adam(1e-3))


def train_step(state, batch):
    def loss_fn(params):
        return jnp.mean((batch["x"] @ params["w"] + params["b"]) ** 2)

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def test_an_nnx_step():
    class Model(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(64, 512, rngs=nnx.Rngs(0))

    strategy = jdist.sharded()

    @jdist.nnx.distribute(strategy)
    def step(model, optimizer, batch):
        loss, grads = jdist.nnx.value_and_grad(lambda model: jnp.mean(model.dense(batch["x"]) ** 2))(model)
        optimizer.update(model, grads)
        return {"loss": loss}

    model = Model()
    found = jdist.explain(step, model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), BATCH)
    assert "in 8 parts over replica: [8, 512] each" in str(found.state)
    assert ("all-gather", 64 * 512 * 4) in {(c.kind, c.bytes) for c in found.collectives}


@pytest.mark.parametrize("from_shapes", [False, True])
def test_parts_and_what_is_exchanged(from_shapes):
    strategy = jdist.sharded(within=4)
    step = jdist.distribute(train_step, strategy)
    state = jax.eval_shape(create) if from_shapes else strategy.init(create)
    found = jdist.explain(step, state, BATCH)
    assert found.state == strategy.report(state)
    bytes_of = {(c.kind, c.axes): c.bytes for c in found.collectives}
    weights = 64 * 512 * 4
    assert bytes_of["all-gather", "replica_in_group"] == weights
    assert bytes_of["reduce-scatter", "replica_in_group"] == weights
    assert found.arguments < 3 * weights / 4 * 1.1
    text = str(found)
    assert "in 4 parts over replica_in_group, 2 copies of each: [16, 512] each" in text
    assert "collectives in one call\n" in text
    assert f"{weights:,}" in text
    assert found._repr_html_().count("<table") == 3


def test_one_device_exchanges_nothing():
    found = jdist.explain(jdist.distribute(train_step, jdist.one_device()), jax.eval_shape(create), BATCH)
    assert "collectives in one call: none" in str(found)


def test_what_is_no_step():
    with pytest.raises(StepError, match=r"jdist\.explain takes a step that .* got a function"):
        jdist.explain(train_step, jax.eval_shape(create), BATCH)


def loss_of(params, x, use):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x @ params["first"], params["layers"])
    return jnp.mean(use(x, params["last"]) ** 2)


def gathers_of(use=jnp.matmul, *, tx=None, decay=0.0, transform=lambda f: f, metric=lambda params: 0.0):
    """What `explain` says of a step over a matrix, a stack of layers and a matrix that is used by `use`: by leaf."""

    def create():
        params = {"first": jnp.ones((64, 64)), "last": jnp.ones((64, 64)), "layers": jnp.ones((4, 64, 64))}
        return jdist.TrainState.create(params=params, tx=tx or optax.adam(1e-3))

    def step(state, batch):
        def loss_fn(params):
            loss = loss_of(params, batch["x"], use)
            return loss + decay * sum(jnp.sum(x**2) for x in jax.tree.leaves(params)) if decay else loss

        _, grads = transform(jdist.value_and_grad(loss_fn))(state.params)
        new = state.apply_gradients(grads=grads)
        return new, {"norm": optax.tree.norm(state.params), "metric": metric(state.params)}

    found = jdist.explain(jdist.distribute(step, jdist.sharded()), jax.eval_shape(create), BATCH)
    assert all(gather.line.startswith("test_explain.py:") and gather.line in str(found) for gather in found.gathers)
    by_leaf = {}
    for gather in found.gathers:
        by_leaf.setdefault(gather.leaf, []).append((gather.why, gather.num_bytes))
    return by_leaf


MATRIX, STACK = 64 * 64 * 4, 4 * 64 * 64 * 4  # bytes
USED, LAYERED = ("where the loss uses it", MATRIX), ("layer by layer in a scan", MATRIX)


def test_gathers_of_a_step_that_logs_a_norm_are_those_of_its_loss():
    assert gathers_of() == {
        "params['first']": [USED],
        "params['last']": [USED],
        "params['layers']": [LAYERED],
    }


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


@pytest.mark.parametrize(
    ("use", "before"),
    [
        (lambda x, w: jax.lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: x, x), "a cond"),
        (
            lambda x, w: jax.lax.scan(lambda x, _: (x @ w, None), x, None, 3)[0],
            "a scan that uses it in every iteration",
        ),
        (product, "a custom_vjp_call"),
    ],
)
def test_what_is_gathered_before_a_body(use, before):
    assert gathers_of(use)["params['last']"] == [(f"whole, before {before}", MATRIX)]


def test_weight_decay_in_the_loss_gathers_a_whole_stack():
    assert gathers_of(decay=0.1)["params['layers']"] == [LAYERED, ("where the loss uses it", STACK)]


def test_under_a_transformation_of_the_steps_own_all_is_gathered_where_it_is_used():
    found = gathers_of(transform=jax.jit)
    assert found["params['layers']"] == [("layer by layer in a scan", STACK // 4)]
    assert found["params['last']"] == [("read outside of the step's own jdist.value_and_grad", MATRIX)]


def test_gathers_for_the_update_and_for_a_metric():
    found = gathers_of(tx=optax.contrib.muon(1e-3), metric=lambda params: (params["first"] @ params["last"]).sum())
    assert found["params['first']"] == [USED, ("whole, for the update or a metric (dot_general)", MATRIX)]
    ((momentum, gathers),) = [(leaf, found[leaf]) for leaf in found if leaf.endswith(".mu['last']")]
    assert momentum.startswith("opt_state")
    assert gathers[0][0].startswith("whole, for the update or a metric")


def test_copies_gather_nothing():
    found = jdist.explain(jdist.distribute(train_step, jdist.mirrored()), jax.eval_shape(create), BATCH)
    assert found.gathers == ()
