"""Objects that a step has seen before: it need not split them again, and computes what it would if it did."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist
from jdist.nnx import replica
from jdist.support.arrays import is_key
from tests.toys import TWO

BATCH = {"x": np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, 2)}


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Pair:
    """A container of the user's own, which JAX knows as a tree."""

    inner: nnx.Variable
    factor: float

    def tree_flatten(self):
        return (self.inner,), self.factor

    @classmethod
    def tree_unflatten(cls, factor, children):
        return cls(*children, factor)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(slots=True)
class Slots:
    inner: nnx.Variable
    factor: float = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(unsafe_hash=True)
class Config:
    gain: float


class Unlisted(nnx.Module, pytree=False):
    """A module that JAX does not know as a tree."""

    def __init__(self):
        self.gain = 1.0


class Net(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(2, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.several = nnx.List([nnx.Linear(4, 4, rngs=rngs)])
        self.listed = nnx.data([nnx.Linear(4, 4, rngs=rngs)])
        self.named = nnx.Dict({"last": nnx.Linear(4, 1, rngs=rngs)})
        self.scale = 1.0
        self.unused = 5.0
        self.unlisted, self.config = Unlisted(), Config(1.0)

    def __call__(self, x):
        x = self.dropout(self.norm(self.first(x)))
        for layer in [*self.several, *self.listed]:
            x = layer(x)
        gain = self.unlisted.gain * self.config.gain * getattr(self, "gain", 1.0)
        return gain * self.scale * self.named["last"](x)[:, 0]


def step(model, optimizer, metrics, batch):
    def loss_fn(model):
        return jdist.mean((model(batch["x"]) - batch["x"][:, 0]) ** 2)

    loss, grads = jdist.nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return {"loss": loss, "kept": optimizer.opt_state[0].mu["first"]["bias"][...] * 1}


def objects():
    model = Net(0)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    return model, optimizer, nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


def rename(model, *_):
    model.gain = model.unused
    del model.unused


def swap(model, *_):
    model.several[0], model.listed[0] = model.listed[0], model.several[0]


def distribute(function):
    return jdist.nnx.distribute(TWO, verify="off")(function)


def clear(model, optimizer, metrics):
    optimizer.opt_state[0].mu["first"]["bias"] = nnx.training.optimizer.OptVariable(jnp.ones(4))


CHANGES = {
    "nothing": lambda *_: None,
    "values": lambda model, *_: nnx.update(model, jax.tree.map(lambda x: x * 2, nnx.state(model, nnx.Param))),
    "one value": lambda model, *_: model.first.bias.set_value(jnp.ones(4)),
    "the values that were there": lambda model, *_: nnx.update(model, nnx.state(model)),
    "a variable": lambda model, *_: setattr(model.first, "bias", nnx.Param(jnp.full(4, 0.5))),
    "eval mode": lambda model, *_: model.eval(),
    "a static number": lambda model, *_: setattr(model, "scale", 3.0),
    "an attribute of a child": lambda model, *_: setattr(model.dropout, "rate", 0.0),
    "a child": lambda model, *_: setattr(model, "first", nnx.Linear(2, 4, rngs=nnx.Rngs(5))),
    "an item of a List": lambda model, *_: model.several.__setitem__(0, nnx.Linear(4, 4, rngs=nnx.Rngs(6))),
    "an item of a plain list": lambda model, *_: model.listed.__setitem__(0, nnx.Linear(4, 4, rngs=nnx.Rngs(7))),
    "items swapped": swap,
    "a name": rename,
    "an item of a Dict": lambda model, *_: model.named.__setitem__("last", nnx.Linear(4, 1, rngs=nnx.Rngs(8))),
    "an attribute of a module that is no tree": lambda model, *_: setattr(model.unlisted, "gain", 2.0),
    "a field of a static value": lambda model, *_: setattr(model.config, "gain", 2.0),
    "metadata": lambda model, *_: model.first.bias.set_metadata(note="new"),
    "a key": lambda model, *_: model.dropout.rngs.key.set_value(jax.random.key(9)),
    "metrics": lambda model, optimizer, metrics: metrics.reset(),
    "a variable of the optimizer": clear,
    "the optimizer's rule": lambda model, optimizer, metrics: setattr(optimizer, "tx", optax.adam(0.5)),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_change_between_two_calls_counts(change):
    def trained(of_the_next_call):
        held, distributed = objects(), distribute(step)
        for _ in range(2):
            distributed(*held, BATCH)
        CHANGES[change](*held)
        results = of_the_next_call(distributed)(*held, BATCH)
        return results, jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, nnx.state(held))

    kept = trained(lambda distributed: distributed)
    # A step of its own has seen no objects before.
    split = trained(lambda _: distribute(step))
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(split), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("container", [Pair, Slots])
def test_containers_of_the_users_own(container):
    class Scaled(nnx.Module):
        def __init__(self):
            self.pair = nnx.data(container(nnx.Param(jnp.float32(2.0)), 1.0))

    def product(model, batch):
        return {"y": model.pair.inner[...] * model.pair.factor * jdist.mean(jnp.ones_like(batch["x"][:, 0]))}

    model, distributed = Scaled(), distribute(product)
    assert float(distributed(model, BATCH)["y"]) == 2
    model.pair.factor = 10.0
    assert float(distributed(model, BATCH)["y"]) == 20
    model.pair.inner = nnx.Param(jnp.float32(3.0))
    assert float(distributed(model, BATCH)["y"]) == 30


def test_a_static_value_that_cannot_be_hashed_is_refused_in_words():
    @dataclasses.dataclass
    class Unhashable:
        gain: float

    class Scaled(nnx.Module):
        def __init__(self):
            self.config, self.w = Unhashable(1.0), nnx.Param(jnp.ones(()))

    with pytest.raises(jdist.errors.StepError, match="cannot be hashed: unhashable type: 'Unhashable'"):
        distribute(lambda model, batch: {"y": model.w[...]})(Scaled(), BATCH)


def test_what_is_done_to_the_last_state_changes_no_later_call():
    held, distributed = objects(), distribute(step)
    distributed(*held, BATCH)
    wanted = [np.asarray(x) for x in jax.tree.leaves(nnx.state(held[0], nnx.Param))]
    for variable in jax.tree.leaves(distributed.last_state, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        if isinstance(variable, nnx.Param):
            variable.set_value(variable[...] + 100)
    found = [np.asarray(x) for x in jax.tree.leaves(nnx.state(held[0], nnx.Param))]
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert float(distributed(*held, BATCH)["loss"]) < 50


def test_objects_whose_arrays_another_program_has_taken_are_refused():
    held, distributed = objects(), distribute(step)
    for _ in range(2):
        distributed(*held, BATCH)
    jax.jit(lambda state: jax.tree.map(lambda x: x * 2, state), donate_argnums=0)(nnx.state(held[0], nnx.Param))
    with pytest.raises(jdist.errors.DonatedStateError, match="was donated"):
        distributed(*held, BATCH)


def test_a_variable_that_a_callback_replaces_is_trained_on():
    def train(model, optimizer, batch):
        loss, grads = jdist.nnx.value_and_grad(lambda model: jdist.mean(model(batch["x"])[:, 0] ** 2))(model)
        optimizer.update(model, grads)
        return {"loss": loss}

    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def replace(moment):
        if moment.step == 2:
            model.bias = nnx.Param(jnp.full(1, 100.0))

    data = {"x": BATCH["x"].repeat(4, 0)}
    options = {"global_batch": 8, "progress": False, "log_to": None, "verify": "off"}
    (trained, _), _ = jdist.fit(distribute(train), (model, optimizer), data, callbacks=[replace], **options)
    assert abs(float(trained.bias[...][0])) < 1


def test_the_same_objects_are_split_once(monkeypatch):
    seen = []
    monkeypatch.setattr(replica.nnx, "split", lambda *args: seen.append(args) or nnx_split(*args))
    held = objects()
    distributed = distribute(step)
    distributed(*held, BATCH)
    seen.clear()
    for _ in range(3):
        distributed(*held, BATCH)
    assert not seen
    distributed(*objects(), BATCH)
    assert seen


nnx_split = nnx.split


def test_two_steps_over_the_same_objects_take_turns():
    def evaluate(model, batch):
        return {"mean": jdist.mean(model(batch["x"]))}

    held = objects()
    train, test = distribute(step), distribute(evaluate)
    split = objects()
    for _ in range(3):
        train(*held, BATCH)
        found = test(held[0], BATCH)
        distribute(step)(*split, BATCH)
        wanted = distribute(evaluate)(split[0], BATCH)
        np.testing.assert_array_equal(found["mean"], wanted["mean"])


def test_arrays_that_are_attributes_themselves():
    class Counter(nnx.Module):
        def __init__(self):
            self.count = nnx.data(jnp.zeros((), jnp.int32))
            self.w = nnx.Param(jnp.ones(()))

    def count(model, batch):
        model.count = model.count + 1
        return {"w": model.w[...] * jdist.mean(batch["x"][:, 0])}

    model = Counter()
    distributed = distribute(count)
    for _ in range(3):
        distributed(model, BATCH)
    assert int(model.count) == 3
