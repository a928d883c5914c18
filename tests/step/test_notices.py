"""What a step is warned of by its trace alone, and what looks like it and is right."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import jdist
from tests.toys import DEVICES, TRANSFORMS, TWO

ROWS = 16
IN_PARTS = jdist.sharded(DEVICES, whole_below=0)
BATCH = {"x": np.ones((ROWS, 8), np.float32), "y": np.arange(ROWS) % 3, "mask": np.ones(ROWS, bool)}
STATE = {"w": np.ones((8, 3), np.float32), "key": jax.random.key(0)}


def losses(w, x, batch):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, batch["y"])


def step_of(loss, *, key=lambda key: key, op="mean"):
    def train_step(state, batch):
        value, grad = jdist.value_and_grad(lambda w: loss(w, batch, key(state["key"])), op=op)(state["w"])
        return {**state, "w": state["w"] - 0.1 * grad}, {"loss": value}

    return train_step


def of_rows(make_rows):
    """A loss on rows that are made of the batch's and a key."""
    return lambda w, batch, key: jdist.mean(losses(w, make_rows(batch["x"], key), batch))


def diffused(x, key):
    of_times, of_noise = jax.random.split(key)
    kept = jnp.linspace(0.1, 0.9, 10)[jax.random.randint(of_times, (len(x),), 0, 10)][:, None]
    return kept * x + (1 - kept) * jax.random.normal(of_noise, x.shape)


def sampled(w, batch, key):
    means = batch["x"] @ w
    return jdist.mean((means + jnp.exp(means) * jax.random.normal(key, means.shape)) ** 2)


def in_a_loop(x, key):
    return lax.scan(lambda x, key: (x + jax.random.normal(key, x.shape), None), x, jax.random.split(key, 3))[0]


SHARED = {
    "diffusion": of_rows(diffused),
    "variational autoencoder": sampled,
    "dropout": of_rows(lambda x, key: nn.Dropout(0.5, deterministic=False).apply({}, x, rngs={"dropout": key})),
    "a number for each row": of_rows(lambda x, key: x * jax.random.uniform(key, (len(x), 1))),
    "in a loop": of_rows(in_a_loop),
    "rematerialised": of_rows(jax.checkpoint(lambda x, key: x * jax.random.bernoulli(key, 0.5, x.shape))),
    "in a branch": of_rows(
        lambda x, key: lax.cond(x.sum() > 0, lambda: x * jax.random.normal(key, x.shape), lambda: x)
    ),
}
ONE_FOR_ALL = {
    "noise of parameters": lambda w, b, key: jdist.mean(losses(w + jax.random.normal(key, w.shape), b["x"], b)),
    "features that are dropped": of_rows(lambda x, key: x * jax.random.bernoulli(key, 0.5, x.shape[1:])),
    "a layer that is dropped": of_rows(lambda x, key: jnp.where(jax.random.bernoulli(key), x, 2 * x)),
    "a branch that is drawn": of_rows(
        lambda x, key: lax.cond(jax.random.bernoulli(key), lambda x: x, lambda x: 2 * x, x)
    ),
}
GLOBAL = {
    "a sum": lambda w, batch, _: losses(w, batch["x"], batch).sum() / ROWS,
    "a sum and a penalty": lambda w, batch, _: losses(w, batch["x"], batch).sum() / ROWS + (w**2).sum(),
    "compute_average_loss": lambda w, batch, _: jdist.compute_average_loss(losses(w, batch["x"], batch)),
}
OWN = {
    "a mean": lambda w, batch, _: losses(w, batch["x"], batch).mean(),
    "a mean of as many as the global batch has rows": lambda w, batch, _: (batch["x"][:, :2] @ w[:2, :2] ** 2).mean(),
    "a masked mean": lambda w, batch, _: jdist.mean(losses(w, batch["x"], batch), batch["mask"]),
}


def noticed(step, strategy=TWO, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jdist.distribute(step, strategy, **options).preview(STATE, BATCH)
    assert all(each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("name", SHARED)
def test_the_same_draws_for_the_rows_of_every_replica(name):
    (text,) = noticed(step_of(SHARED[name]))
    assert text.startswith("train_step draws ")
    assert "jdist.replica_rng(key)" in text
    assert noticed(step_of(SHARED[name]), jdist.one_device(), accumulate=2)
    assert noticed(step_of(SHARED[name]), IN_PARTS) == [text]
    assert not noticed(step_of(SHARED[name], key=jdist.replica_rng))
    assert not noticed(step_of(SHARED[name], key=jdist.replica_rng), accumulate=2)
    assert not noticed(step_of(SHARED[name], key=jdist.replica_rng), IN_PARTS)
    for strategy in (jdist.default(), jdist.one_device(), TRANSFORMS["jit"]):
        assert not noticed(step_of(SHARED[name]), strategy)


@pytest.mark.parametrize("name", ONE_FOR_ALL)
def test_draws_that_are_one_for_all_rows(name):
    assert not noticed(step_of(ONE_FOR_ALL[name]))
    assert not noticed(step_of(ONE_FOR_ALL[name]), IN_PARTS)


@pytest.mark.parametrize("name", GLOBAL)
def test_a_loss_that_is_divided_by_the_global_batch_and_averaged(name):
    (text,) = noticed(step_of(GLOBAL[name]))
    assert f"divides its loss by {ROWS}" in text
    assert 'op="sum"' in text
    assert noticed(step_of(GLOBAL[name]), jdist.one_device(), accumulate=2)
    assert noticed(step_of(GLOBAL[name]), IN_PARTS) == [text]
    assert not noticed(step_of(GLOBAL[name], op="sum"))
    assert not noticed(step_of(GLOBAL[name]), jdist.one_device())


def test_a_function_that_every_replica_runs():
    (batch,) = TWO.distribute_dataset([{"x": BATCH["x"], "y": BATCH["y"]}])
    losing = {"divides its loss by 16": GLOBAL["a sum"], "draws ": SHARED["diffusion"]}
    for text, loss in losing.items():
        with pytest.warns(UserWarning, match=f"^train_step {text}"):
            TWO.run(step_of(loss), STATE, batch)
    TWO.run(step_of(GLOBAL["a sum"], op="sum"), STATE, batch)  # warnings are errors
    TWO.run(step_of(SHARED["diffusion"], key=jdist.replica_rng), STATE, batch)


@pytest.mark.parametrize("name", OWN)
def test_a_loss_that_is_divided_by_a_replicas_own_rows(name):
    assert not noticed(step_of(OWN[name]))
    assert not noticed(step_of(OWN[name]), IN_PARTS)


def adversarial(delta_of):
    """A step on rows that are moved by the gradient of a perturbation, as in PGD."""

    def loss(w, batch, key):
        by_rows = jdist.grad(lambda delta: losses(w, batch["x"] + delta, batch).sum(), op="sum")
        delta = jnp.sign(by_rows(delta_of(batch, key)))
        return jdist.mean(losses(w, batch["x"] + 0.1 * delta, batch))

    return loss


@pytest.mark.parametrize(
    ("delta_of", "is_own"),
    [
        (lambda batch, key: jnp.zeros_like(batch["x"]), False),
        (lambda batch, key: 0 * batch["x"], True),
        (lambda batch, key: 0.1 * jax.random.normal(jdist.replica_rng(key), batch["x"].shape), True),
        (lambda batch, key: jnp.zeros(batch["x"].shape[1:]), True),  # one for all rows, as of a universal perturbation
    ],
)
def test_a_gradient_of_rows_by_what_all_replicas_have_alike(delta_of, is_own):
    for strategy in (TWO, IN_PARTS):
        found = noticed(step_of(adversarial(delta_of)), strategy)
        assert ["takes a gradient by float32[8,8], which is equal on all replicas" in text for text in found] == (
            [] if is_own else [True]
        )
    assert not noticed(step_of(adversarial(delta_of)), TRANSFORMS["jit"])


class Convolutions(nn.Module):
    """A net in which the sizes of a batch are those of its weights, to mistake one for the other."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (8, 8))(x.reshape(*x.shape, 1))
        return nn.Dense(3)(nn.Embed(8, 8)(x.argmax(-1)[:, 0, :1]).mean(1) + nn.Dense(8)(x.reshape(len(x), -1)))


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_gradients_of_weights_that_have_the_sizes_of_a_batch(op):
    model, batch = Convolutions(), {**BATCH, "x": np.ones((ROWS, 8, 8), np.float32)}
    state = {"w": model.init(jax.random.key(0), batch["x"][:2]), "key": STATE["key"]}

    def train_step(state, batch):
        loss, grads = jdist.value_and_grad(lambda w: model.apply(w, batch["x"]).var(), op=op)(state["w"])
        return {**state, "w": jax.tree.map(jnp.subtract, state["w"], grads)}, {"loss": loss}

    jdist.distribute(train_step, TWO).preview(state, batch)  # warnings are errors


def test_the_first_batch_that_is_filled_up_for_a_step_without_a_mask():
    rows = {name: x[:13] for name, x in BATCH.items() if name != "mask"}
    source = jdist.data.from_arrays(rows, global_batch=8)
    train_step = jdist.distribute(step_of(OWN["a mean"]), TWO)
    state, found = STATE, []
    for _ in range(2):
        for batch in TWO.distribute_dataset(source):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                state, _ = train_step(state, batch)
            found += [str(each.message) for each in caught]
    assert len(found) == 1
    assert 'train_step never reads batch["mask"]' in found[0]


def test_filled_rows_that_come_back_one_by_one_need_no_mask():
    predict = jdist.distribute(lambda w, batch: batch["x"] * w, TWO, returns=("examples",))
    for batch in TWO.distribute_dataset(jdist.data.from_arrays({"x": np.arange(7, dtype=np.float32)}, global_batch=4)):
        assert predict(1.0, batch).shape in ((4,), (3,))


def test_filled_rows_of_an_nnx_model_that_come_back_one_by_one_need_no_mask():
    model = nnx.BatchNorm(1, use_running_average=True, rngs=nnx.Rngs(0))
    predict = jdist.nnx.distribute(TWO, returns=("examples",))(lambda model, batch: model(batch["x"]))
    x = np.arange(7, dtype=np.float32)[:, None]
    for batch in TWO.distribute_dataset(jdist.data.from_arrays({"x": x}, global_batch=4)):
        assert predict(model, batch).shape in ((4, 1), (3, 1))
