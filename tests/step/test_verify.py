"""`jdist.verify`: what a step computes of its own rows is named, and a step that is a mean over rows never is."""

import functools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.experimental import io_callback

import jdist
from jdist import VerificationWarning
from jdist.errors import StepError, VerificationError
from jdist.step.base import Distributed
from jdist.step.differences import Found, Pair
from tests import toys

pytestmark = pytest.mark.xdist_group(__name__)  # several look at the same comparison

ROWS, FEATURES, CLASSES = 32, 5, 3
LEARNING_RATE = 1e-3


def batch(rows=ROWS, seed=0):
    random = np.random.default_rng(seed)
    return {
        "x": random.normal(size=(rows, FEATURES)).astype(np.float32),
        "y": random.integers(0, CLASSES, rows),
        "weight": random.uniform(0, 1, rows).astype(np.float32),
        "mask": np.ones(rows, bool),
    }


def state(seed=1):
    random = np.random.default_rng(seed)
    return {"w": random.normal(size=(FEATURES, CLASSES)).astype(np.float32), "b": np.zeros(CLASSES, np.float32)}


def losses(params, batch):
    logits = batch["x"] @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def sgd(params, grads):
    return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)


step_of = functools.partial(toys.step_of, rate=LEARNING_RATE)


def of_metric(metric):
    """A right step with one more metric."""

    def train_step(state, batch):
        loss, grads = jdist.value_and_grad(lambda p: jdist.mean(losses(p, batch), batch["mask"]))(state)
        return sgd(state, grads), {"loss": loss, "metric": metric(state, batch)}

    return train_step


right = step_of(lambda params, batch: jdist.mean(losses(params, batch), batch["mask"]))


def by_hand(params, batch):
    return (batch["weight"] * losses(params, batch)).sum() / batch["weight"].sum()


def contrastive(params, batch):
    z = batch["x"] @ params["w"] + params["b"]
    return jdist.mean(optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(len(z))))


def right_answers(params, batch):
    return ((batch["x"] @ params["w"]).argmax(1) == batch["y"]).sum().astype(float)


def per_example(state, batch):
    def clipped(row):
        grads = jax.grad(lambda p: losses(p, jax.tree.map(lambda x: x[None], row)).mean())(state)
        return jax.tree.map(lambda g: g / jnp.maximum(1.0, 5 * optax.global_norm(grads)), grads)

    grads = jax.tree.map(lambda g: g.mean(0), jax.vmap(clipped)(batch))
    return sgd(state, grads), {"norm": optax.global_norm(grads)}


def minibatches(state, batch):
    loss = 0.0
    for i in range(2):
        part = jax.tree.map(lambda x, i=i: x[i * len(x) // 2 : (i + 1) * len(x) // 2], batch)
        loss, grads = jdist.value_and_grad(lambda p, part=part: jdist.mean(losses(p, part)))(state)
        state = jax.tree.map(lambda p, g: p - 0.5 * g, state, grads)
    return state, {"loss": loss}


def minibatches_in_a_scan(state, batch):
    parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)

    def body(params, part):
        loss, grads = jdist.value_and_grad(lambda p: jdist.mean(losses(p, part)))(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss

    state, all_losses = lax.scan(body, state, parts)
    return state, {"loss": all_losses.mean()}


def time_major(state, batch):
    def loss_fn(params):
        def cell(h, x):
            h = jnp.tanh(x @ params["w"] + params["b"] + 0.5 * h)
            return h, (h**2).mean()

        _, each = lax.scan(cell, jnp.zeros(CLASSES), batch["x"])
        return each.mean()

    loss, grads = jdist.value_and_grad(loss_fn)(state)
    return sgd(state, grads), {"loss": loss}


def column(params, batch):
    """Between [rows, 1] and [rows]."""
    return ((batch["x"] @ params["w"][:, :1] - batch["weight"]) ** 2).mean()


def standardised(params, batch):
    score = (batch["x"] @ params["w"])[:, 0]
    return jdist.mean((score - score.mean()) / score.std() * batch["weight"])


NO_MEAN, PAIRS, TOTAL, EXTREME, CURVED, STATISTICS, COLUMN, GLOBAL = (
    "not a mean over the rows",
    "compared with one another",
    "sum or a count",
    "maximum or minimum",
    "function of a mean",
    "statistics of each replica's own rows",
    "[rows, 1] meets [rows]",
    "divided by the rows of the global batch",
)
WRONG = {
    "sum / sum(weights)": (step_of(by_hand), "metrics['loss']", NO_MEAN),
    "contrastive": (step_of(contrastive), "metrics['loss']", PAIRS),
    "count": (of_metric(lambda _, batch: batch["mask"].sum().astype(float)), "metrics['metric']", TOTAL),
    "right answers": (of_metric(right_answers), "metrics['metric']", TOTAL),
    "maximum": (of_metric(lambda _, batch: jnp.abs(batch["x"]).max()), "metrics['metric']", EXTREME),
    "argmax": (of_metric(lambda _, batch: batch["weight"].argmax().astype(float)), "metrics['metric']", EXTREME),
    "per example": (per_example, "metrics['norm']", "never brought together"),
    "minibatches": (minibatches, "state['w']", "minibatches are cut"),
    "minibatches in a scan": (minibatches_in_a_scan, "state['w']", "minibatches are cut"),
    "time first": (time_major, "metrics['loss']", "first axis of its batch"),
    "perplexity": (of_metric(lambda p, b: jnp.exp(jdist.mean(losses(p, b), b["weight"]))), "metrics['metric']", CURVED),
    "standardised": (step_of(standardised), "metrics['loss']", STATISTICS),
    "broadcast column": (step_of(column), "state['w']", COLUMN),
    "divided by the global batch": (step_of(lambda p, b: losses(p, b).sum() / ROWS), "metrics['loss']", GLOBAL),
    "a metric that is a ratio": (of_metric(by_hand), "metrics['metric']", NO_MEAN),
}


def verified(step, given=None, rows=None, strategy=None, **options):
    made = jdist.distribute(step, strategy or jdist.mirrored(), **options)
    return jdist.verify(made, state() if given is None else given, batch() if rows is None else rows)


@functools.cache
def found_in(name):
    return verified(WRONG[name][0])


@pytest.mark.parametrize("name", WRONG)
def test_names_what_differs_and_why(name):
    _, leaf, cause = WRONG[name]
    found = found_in(name)
    assert not found
    causes = {each.leaf: each.cause for each in found.differences}
    assert cause in causes[leaf], str(found)
    assert found.remedy
    assert all(each.leaf in str(found) for each in found.differences)


@pytest.mark.parametrize(
    "name", ["sum / sum(weights)", "contrastive", "count", "right answers", "maximum", "time first"]
)
def test_the_global_view_is_the_last_remedy_where_it_is_exact(name):
    found = found_in(name)
    assert 'transform="jit"' in found.remedy.removeprefix(found.differences[0].remedy)
    assert str(found).index("Likely cause") < str(found).index('transform="jit"')
    assert verified(WRONG[name][0], strategy=jdist.mirrored(transform="jit"))


def test_the_global_view_does_not_hide_a_column_that_meets_rows():
    assert "transform=" not in str(found_in("broadcast column"))


def test_a_metric_alone_that_is_wrong_leaves_the_rest_in_peace():
    assert [each.leaf for each in found_in("count").differences] == ["metrics['metric']"]


def test_a_gradient_that_is_a_tenth_too_large():
    def train_step(state, batch):
        loss, grads = jdist.value_and_grad(lambda p: jdist.mean(losses(p, batch), batch["mask"]))(state)
        wrong = 1.1 if jdist.num_replicas() > 1 else 1.0
        return jax.tree.map(lambda p, g: p - 1e-4 * wrong * g, state, grads), {"loss": loss}

    found = verified(train_step)
    assert {each.leaf for each in found.differences} == {"state['w']", "state['b']"}
    assert all(0.05 < each.relative < 0.2 for each in found.differences)


def in_float8(x):
    return x.astype(jnp.float8_e4m3fn).astype(jnp.float32)


def test_one_coarse_number_blinds_the_comparison_of_no_other_leaf():
    def train_step(loss_fn, state, batch):
        loss, grads = jdist.value_and_grad(lambda p: loss_fn(losses(p, batch)))(state)
        return sgd(state, grads), {"loss": loss, "stored": jdist.mean(in_float8(batch["x"] @ state["w"]).sum(-1))}

    assert verified(functools.partial(train_step, jdist.mean)).ok
    found = verified(functools.partial(train_step, lambda losses: losses.sum() / ROWS))
    assert {each.leaf for each in found.differences} == {"state['w']", "state['b']", "metrics['loss']"}


def test_gradients_that_each_replica_stores_in_eight_bits_round_apart():
    def train_step(loss_fn, state, batch):
        def own_loss(p):
            coarse = {**p, "w": in_float8(p["w"])}  # whose gradient is cast, too, before it is combined
            return loss_fn(losses(coarse, {**batch, "x": in_float8(batch["x"])}))

        loss, grads = jdist.value_and_grad(own_loss)(state)
        return sgd(state, grads), {"loss": loss}

    found = verified(functools.partial(train_step, jdist.mean))
    assert found.ok, found
    assert "state['w'] (within" in str(found)
    found = verified(functools.partial(train_step, lambda losses: losses.sum() / ROWS))
    assert {each.leaf for each in found.differences} == {"state['w']", "state['b']", "metrics['loss']"}


def test_leaves_that_rounding_hides_are_listed_with_how_coarsely_they_are_compared():
    def loss_fn(params, batch):
        logits = batch["x"].astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)
        return jdist.mean((logits.sum(-1).astype(jnp.float32) - batch["weight"]) ** 2)

    found = verified(step_of(loss_fn))
    assert found.ok
    assert re.search(r"closely, as rounding .*state\['w'\] \(within \d+% of its change", str(found))
    assert all(0 < int(percent) < 20 for percent in re.findall(r"within (\d+)%", str(found)))  # as bfloat16 rounds


KEPT = (np.arange(ROWS) % 7 < np.where(np.arange(ROWS) < 8, 6, 2)).astype(np.float32)
DECIDED = {
    "a mask of floats": lambda each, kept: jnp.where(kept == 1.0, each, 0).sum() / (kept == 1.0).sum(),
    "hidden by -1e9": lambda each, kept: -jax.nn.logsumexp((1 - kept) * -1e9 - each),
    "classes of floats": lambda each, kept: jnp.where(3 * kept == 3, each, 0).sum() / kept.sum(),
}


@pytest.mark.parametrize("name", DECIDED)
def test_the_measure_of_rounding_leaves_decisions_on_whole_numbers_alone(name):
    assert not verified(step_of(lambda p, b: DECIDED[name](losses(p, b), b["kept"])), rows={**batch(), "kept": KEPT})
    found = verified(step_of(lambda p, b: jdist.mean(losses(p, b), b["kept"] == 1)), rows={**batch(), "kept": KEPT})
    assert found.ok, str(found)


STRATEGIES = {
    "mirrored": jdist.mirrored,
    "two devices": lambda: jdist.mirrored(["cpu:0", "cpu:1"]),
    "pmap": lambda: jdist.mirrored(transform="pmap"),
    "global view": lambda: jdist.mirrored(transform="jit"),
    "ring": lambda: jdist.mirrored(all_reduce="ring"),
    "compressed": lambda: jdist.mirrored(all_reduce={"name": "compressed", "dtype": "bf16"}),
    "central_storage": jdist.central_storage,
    "multi_worker": jdist.multi_worker,
}
OPTIONS = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "bf16": {"precision": jdist.precision("bf16")},
    "fp16": {"precision": jdist.precision("fp16")},
    "skip": {"non_finite": "skip"},
    "apply": {"non_finite": "apply"},
    "kept": {"donate": False},
}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_mean_over_rows_is_the_same_and_a_ratio_of_own_rows_is_not(kind):
    found = verified(right, strategy=STRATEGIES[kind]())
    assert found.ok, str(found)
    assert found.num_compared == 3
    found = verified(step_of(by_hand), strategy=STRATEGIES[kind]())
    assert found.ok == (kind == "global view"), "there the batch is whole"


@pytest.mark.parametrize("name", OPTIONS)
def test_a_mean_over_rows_is_the_same_with_every_option(name):
    found = verified(right, **OPTIONS[name])
    assert found.ok, str(found)
    assert not verified(step_of(by_hand), **OPTIONS[name])


def test_the_first_of_several_steps_of_a_call():
    stacked = jax.tree.map(lambda *x: np.stack(x), batch(seed=0), batch(seed=1))
    assert verified(right, rows=stacked, steps_per_call=2)
    assert not verified(step_of(contrastive), rows=stacked, steps_per_call=2)


def test_microbatches_of_one_replica_are_parts_too():
    assert verified(right, strategy=jdist.one_device(), accumulate=4)
    found = verified(step_of(by_hand), strategy=jdist.one_device(), accumulate=4)
    assert not found
    assert found.parts == 4


class Net(nn.Module):
    synchronised: bool
    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        axis: Any = jdist.replica_axes() if self.synchronised else None
        x = nn.relu(nn.BatchNorm(use_running_average=False, axis_name=axis)(x))
        return nn.Dense(CLASSES)(nn.Dropout(self.rate, deterministic=not self.rate)(x))


def net_step(net, tx, key=lambda key: key):
    def train_step(state, batch):
        def loss_fn(params):
            logits, changed = net.apply(
                {"params": params, "batch_stats": state["batch_stats"]},
                batch["x"],
                mutable=["batch_stats"],
                rngs={"dropout": key(state["key"])},
            )
            each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            return jdist.mean(each, batch["mask"]), changed["batch_stats"]

        (loss, stats), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        stats = jdist.aggregate(stats, "mean")
        return {**state, "params": params, "opt_state": opt_state, "batch_stats": stats}, {"loss": loss}

    return train_step


def net_state(net, tx):
    variables = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, batch()["x"])
    return {**variables, "opt_state": tx.init(variables["params"]), "key": jax.random.key(2)}


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adamw(1e-3)], ids=["sgd", "adamw"])
def test_adamw_before_batch_normalisation_amplifies_rounding_and_that_is_no_difference(tx):
    net = Net(synchronised=True)
    found = verified(net_step(net, tx), net_state(net, tx))
    assert found.ok, str(found)


@pytest.mark.parametrize(
    ("synchronised", "accumulate", "cause", "remedy"),
    [
        (False, 1, f"rows are normalised by the {STATISTICS}, as by batch normalisation", "jdist.replica_axes()"),
        (True, 2, "batch normalisation sees the rows of one microbatch at a time", "Do without `accumulate`"),
    ],
    ids=["replicas", "microbatches"],
)
def test_batch_normalisation_by_own_rows(synchronised, accumulate, cause, remedy):
    net, tx = Net(synchronised=synchronised), optax.sgd(0.1)
    found = verified(net_step(net, tx), net_state(net, tx), accumulate=accumulate)
    assert {each.cause for each in found.differences} == {cause}
    assert remedy in found.remedy


@pytest.mark.parametrize("key", [jdist.replica_rng, lambda key: key], ids=["of the replica", "of the state"])
def test_dropout_is_no_difference_and_what_else_differs_is_found(key):
    tx = optax.sgd(0.1)
    step = functools.partial(net_step, tx=tx, key=key)
    net = Net(synchronised=True, rate=0.5)
    found = verified(step(net), net_state(net, tx))
    assert found.ok, str(found)
    assert "random draws" in found.not_compared[0]
    net = Net(synchronised=False, rate=0.5)
    assert not verified(step(net), net_state(net, tx))


@pytest.mark.parametrize(
    ("compute", "why"),
    [
        (lambda: jax.random.binomial(jax.random.key(0), 10, 0.5, (3,)).sum(), "until it accepts"),
        (lambda: io_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), np.float32)), "function of the host"),
    ],
    ids=["draws in a loop that may never end", "a call of the host"],
)
def test_what_cannot_be_run_again_is_left_out(compute, why):
    found = verified(lambda state, batch: (state, {"x": compute()}))
    assert found.num_compared == 0
    assert why in str(found)


def test_prints_are_left_to_the_step_itself(capfd):
    def train_step(state, batch):
        jax.debug.print("here")
        return right(state, batch)

    assert verified(train_step)
    jax.effects_barrier()
    assert "here" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("mean", "same"),
    [(jdist.mean, True), (lambda x, mask: (x * mask).sum() / mask.sum(), False), (lambda x, _: x.mean(), False)],
)
def test_rows_that_fill_a_batch_up_must_not_count(mean, same):
    strategy = jdist.mirrored()
    rows = {name: x[:27] for name, x in batch().items() if name != "mask"}
    (given,) = strategy.distribute_dataset([rows])
    found = verified(step_of(lambda p, b: mean(losses(p, b), b["mask"])), rows=given, strategy=strategy)
    assert found.ok == same
    assert same or 'batch["mask"]' in found.remedy


def nnx_step(axis: Any, strategy):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(FEATURES, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, axis_name=axis, rngs=rngs)
            self.dropout = nnx.Dropout(0.2, rngs=rngs)
            self.last = nnx.Linear(8, CLASSES, rngs=rngs)

        def __call__(self, x):
            return self.last(self.dropout(self.norm(self.first(x))))

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    @jdist.nnx.distribute(strategy)
    def train_step(model, optimizer, batch):
        def loss_fn(model):
            return jdist.mean(
                optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]), batch["mask"]
            )

        loss, grads = jdist.nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return {"loss": loss}

    return train_step, model, optimizer


def test_an_nnx_step():
    strategy = jdist.mirrored()
    train_step, model, optimizer = nnx_step(strategy.axes, strategy)
    before = jax.tree.map(np.array, nnx.state(model, nnx.Param))
    found = jdist.verify(train_step, model, optimizer, batch())
    assert found.ok, str(found)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, nnx.state(model, nnx.Param)))
    train_step, model, optimizer = nnx_step(None, strategy)
    found = jdist.verify(train_step, model, optimizer, batch())
    assert "batch normalisation" in found.differences[0].cause


def test_nothing_is_kept(compiled):
    step = jdist.distribute(right, strategy := jdist.mirrored())
    given = strategy.init(state)
    before = strategy.fetch(given)
    assert jdist.verify(step, given, batch())
    assert step.last_state is None
    jax.tree.map(np.testing.assert_array_equal, strategy.fetch(given), before)
    compiled.clear()
    step(given, batch())
    # The step was compiled for the comparison; what is left are copies and the replicas' check.
    assert len(compiled) <= 4


class TestFirst:
    def test_the_first_call_warns_and_goes_on(self):
        step = jdist.distribute(step_of(by_hand), jdist.mirrored(), verify="first")
        with pytest.warns(
            VerificationWarning, match=r"(?s)not a mean over the rows.*metrics\['loss'\].*verify=\"off\""
        ):
            new, _ = step(state(), batch())
        assert not step.verification
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(new, batch())

    def test_strict_raises_before_anything_is_done(self):
        step = jdist.distribute(step_of(by_hand), jdist.mirrored(), verify="strict")
        with pytest.raises(VerificationError, match="differs between one replica and many") as caught:
            step(state(), batch())
        assert step.last_state is None
        assert caught.value.verification.differences

    @pytest.mark.parametrize("strategy", [jdist.mirrored(), jdist.one_device()], ids=lambda s: s.name)
    def test_strict_is_content_with_a_right_step_and_with_one_replica_within_a_scope_too(self, strategy):
        with strategy.scope():
            step = jdist.distribute(right, strategy, verify="strict")
            assert step(state(), batch())
        assert step.verification.ok

    def test_by_default_and_off_nothing_is_compared(self):
        for options in ({}, {"verify": "off"}):
            step = jdist.distribute(step_of(by_hand), jdist.mirrored(), **options)
            step(state(), batch())
            assert step.verification is None

    def test_what_is_wrong_with_a_call_is_said_as_without(self):
        step = jdist.distribute(right, jdist.mirrored(), verify="first")
        with pytest.raises(jdist.errors.BatchError, match="does not divide"):
            step(state(), batch(rows=13))

    def test_what_is_refused(self):
        with pytest.raises(StepError, match=r"`verify` is 'frist'.*Did you mean"):
            jdist.distribute(right, jdist.mirrored(), verify="frist")
        with pytest.raises(StepError, match=r"jdist\.verify needs a step"):
            jdist.verify(right, state(), batch())


def test_one_replica_has_nothing_to_be_compared_with():
    found = verified(right, strategy=jdist.one_device())
    assert found.ok
    assert found.num_compared == 0


def test_an_average_of_nnx_that_every_replica_adds_to():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

    model = Model(nnx.Rngs(0))
    average = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())

    def step_with(total):
        @jdist.nnx.distribute(jdist.mirrored())
        def train_step(model, average, batch):
            logits = model.layer(batch["x"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            average.update(loss=total(loss), logits=logits, labels=batch["y"])
            return {}

        return train_step

    found = jdist.verify(step_with(jnp.mean), model, average, batch())
    assert found.ok, str(found)
    found = jdist.verify(step_with(jnp.max), model, average, batch())
    (difference,) = found.differences  # the count is right
    assert "['loss']['total']" in difference.leaf
    assert difference.distributed / difference.one < 1  # of one replica's maximum, not of the sum of eight


def test_leaves_of_one_cause_are_one_group_and_the_likeliest_comes_first():
    """BatchNorm, Dropout and metrics in one nnx step, as `fit` meets it."""
    strategy = jdist.mirrored()
    _, model, optimizer = nnx_step(None, strategy)
    average = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())

    @jdist.nnx.distribute(strategy)
    def with_metrics(model, optimizer, average, batch):
        def loss_fn(model):
            logits = model(batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), logits

        (loss, logits), grads = jdist.nnx.value_and_grad(loss_fn, has_aux=True)(model)
        average.update(loss=loss, logits=logits, labels=batch["y"])
        optimizer.update(model, grads)
        return {"loss": loss}

    text = str(jdist.verify(with_metrics, model, optimizer, average, batch()))
    assert text.count("Likely cause") == 1
    assert text.index(STATISTICS) < text.index("state.")
    assert "count" not in text
    assert len(text.splitlines()) <= 9


def test_a_scalar_draw():
    def train_step(state, batch):
        scale = jax.random.uniform(jdist.replica_rng(jax.random.key(0)))
        loss, grads = jdist.value_and_grad(lambda p: scale * jdist.mean(losses(p, batch)))(state)
        return sgd(state, grads), {"loss": loss}

    assert verified(train_step).num_compared == 3


class TestFit:
    def test_prints_what_could_not_be_compared(self, capfd):
        def noisy(state, batch):
            noise = jax.random.normal(jdist.replica_rng(jax.random.key(0)), batch["x"].shape)
            return right(state, {**batch, "x": batch["x"] + noise})

        self.fit(noisy)
        assert "noisy: verify found no difference, but could not compare random draws" in capfd.readouterr().err

    def test_the_first_evaluated_batch_is_verified_too(self):
        def perplexity(state, batch):
            return {"perplexity": jnp.exp(jdist.mean(losses(state, batch), batch["mask"]))}

        options = {"eval_data": self.rows(), "eval_step": perplexity}
        with pytest.warns(VerificationWarning, match=r"perplexity.*(?s:.)*jnp\.exp\(jdist\.all_reduce"):
            self.fit(right, **options)
        self.fit(right, verify="off", **options)

    def rows(self):
        return {name: x for name, x in batch(rows=64).items() if name != "mask"}

    def fit(self, step, **options):
        options = {"global_batch": 32, "progress": False, "log_to": None, **options}
        return jdist.fit(step, state(), self.rows(), strategy=jdist.mirrored(), **options)

    def test_verifies_its_first_step_unless_a_word_turns_it_off_or_makes_it_an_error(self):
        with pytest.warns(VerificationWarning, match="not a mean over the rows"):
            self.fit(step_of(by_hand))
        self.fit(step_of(by_hand), verify="off")
        with pytest.raises(VerificationError):
            self.fit(step_of(by_hand), verify="strict")
        with pytest.raises(StepError, match="`verify` is 'of'"):
            self.fit(step_of(by_hand), verify="of")

    def test_what_the_step_says_itself_comes_first(self):
        step = jdist.distribute(step_of(by_hand), jdist.mirrored(), verify="off")
        jdist.fit(step, state(), self.rows(), global_batch=32, progress=False, log_to=None)
        assert step.verification is None

    def test_a_right_step_is_verified_once(self):
        step = jdist.distribute(right, jdist.mirrored())
        for _ in range(2):
            jdist.fit(step, state(), self.rows(), global_batch=32, progress=False, log_to=None)
            first = step.verification
            assert first.ok
            assert first.num_compared == 3
            assert step.verification is first

    def test_rows_that_a_later_batch_will_lack(self):
        """The first batch is full, and the last one of 90 rows is not: a replica divides by its own count then."""

        @step_of
        def by_own_count(w, batch):
            real = batch["mask"].astype(jnp.float32)
            return (((batch["x"] @ w - batch["y"]) ** 2) * real).sum() / real.sum()

        by_mean = step_of(lambda w, batch: jdist.mean((batch["x"] @ w - batch["y"]) ** 2, batch["mask"]))

        def fitted(step, num_rows):
            random = np.random.default_rng(0)
            rows = {"x": random.normal(size=(num_rows, 3)), "y": random.normal(size=num_rows)}
            step = jdist.distribute(step, jdist.mirrored(), non_finite="skip")  # of no rows the count is zero
            rows = jax.tree.map(np.float32, rows)
            jdist.fit(step, jnp.zeros(3), rows, epochs=1, global_batch=32, progress=False, log_to=None)
            return step.verification

        with pytest.warns(VerificationWarning, match=r"rows that only fill the batch up.*`jdist\.mean\(losses, batch"):
            fitted(by_own_count, 90)
        assert fitted(by_own_count, 96).ok  # no batch of theirs is filled up
        assert fitted(by_mean, 90).ok


@pytest.mark.parametrize("tx", [optax.adam(1e-2), optax.sgd(0.1)], ids=["adam", "sgd"])
def test_a_head_of_zeros_on_balanced_classes_is_no_difference(tx):
    """The gradient of its bias is zero but for the order of the sum; nothing in the arguments that rounding could touch."""

    def step(state, batch):
        def loss_fn(params):
            logits = batch["x"] @ params["w"] + params["b"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        loss, grads = jdist.value_and_grad(loss_fn)(state[0])
        updates, opt_state = tx.update(grads, state[1])
        return (optax.apply_updates(state[0], updates), opt_state), {"loss": loss}

    params = {"w": jnp.zeros((5, 10)), "b": jnp.zeros(10)}
    labels = np.sort(np.arange(40) % 10).astype(np.int32)
    batch = {"x": np.random.default_rng(1).normal(size=(40, 5)).astype(np.float32), "y": labels}
    strategy = jdist.mirrored(jax.devices()[:4])
    assert jdist.verify(jdist.distribute(step, strategy), (params, tx.init(params)), batch).ok


@pytest.mark.parametrize(("num_rows", "devices"), [(16, 2), (4, 4)])
def test_a_result_whose_shape_follows_the_rows(num_rows, devices):
    def step(w, batch):
        loss, grad = jdist.value_and_grad(lambda w: ((batch["x"] * w - 1) ** 2).mean())(w)
        errors = batch["x"] * w - 1
        return w - 0.1 * grad, {"loss": loss, "errors": jnp.stack([errors, errors**2])}

    batch = {"x": np.arange(num_rows, dtype=np.float32)}
    found = jdist.verify(jdist.distribute(step, jdist.mirrored(jax.devices()[:devices])), np.float32(0), batch)
    (difference,) = found.differences
    assert difference.leaf == "metrics['errors']"
    assert f"(2, {num_rows}) as one replica, (2, {num_rows // devices}) distributed" in difference.cause
    assert '"examples"' in difference.remedy


def test_what_is_nan_in_both_is_not_compared():
    batch = {"x": np.full(16, np.nan, np.float32)}

    step = step_of(lambda w, batch: ((batch["x"] * w - 1) ** 2).mean())

    found = jdist.verify(jdist.distribute(step, jdist.mirrored(), non_finite="apply"), np.float32(0), batch)
    assert (found.ok, found.num_compared) == (True, 0)
    assert "state, which is NaN in both" in found.not_compared


def test_a_leaf_that_rounding_alone_changes_has_no_percentage():
    pair = Pair("state['b']", 0, np.zeros(1, np.float32), *[np.full(1, 1e-8, np.float32)] * 2)
    assert list(Found([pair], {pair.name: 1e-6}).coarse()) == [
        "closely, as rounding is most of how they change: state['b'] (it changes by rounding alone, as with a zero gradient)"
    ]


class TestPaddingOfALaterBatch:
    """`jdist.fit` masks rows of its first batch, and one replica does without them."""

    @staticmethod
    def fitted(train_step, state, rows=40):
        data = {name: value for name, value in batch(rows).items() if name != "mask"}
        options = {"strategy": toys.TWO, "global_batch": ROWS, "progress": False, "log_to": None, "verify": "strict"}
        if isinstance(train_step, Distributed):
            del options["strategy"]
        return jdist.fit(train_step, state, data, **options)

    @staticmethod
    def step(gradient, metric):
        def mean(masked, losses, batch):
            return jdist.mean(losses, batch["mask"] if masked else None)

        def train_step(state, batch):
            _, grads = jdist.value_and_grad(lambda p: mean(gradient, losses(p, batch), batch))(state)
            return sgd(state, grads), {"loss": mean(metric, losses(state, batch), batch)}

        return train_step

    @staticmethod
    def nnx_step(gradient, metric):
        @jdist.nnx.distribute(toys.TWO)
        def train_step(model, optimizer, metrics, batch):
            def loss_fn(model):
                logits = model(batch["x"])
                each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
                return (jdist.mean(each, batch["mask"]) if gradient else each.mean()), each

            (_, each), grads = jdist.nnx.value_and_grad(loss_fn, has_aux=True)(model)
            optimizer.update(model, grads)
            metrics.update(values=each, **({"mask": batch["mask"]} if metric else {}))
            return {"loss": jdist.mean(each, batch["mask"])}

        return train_step

    @staticmethod
    def objects(normalizes):
        rngs = nnx.Rngs(0)
        norm = [nnx.BatchNorm(8, axis_name=toys.TWO.axes, rngs=rngs)] if normalizes else []
        model = nnx.Sequential(nnx.Linear(FEATURES, 8, rngs=rngs), *norm, nnx.Linear(8, CLASSES, rngs=rngs))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), nnx.metrics.Average()

    @pytest.mark.parametrize(("gradient", "metric"), [(True, False), (False, True)])
    def test_a_mask_that_one_of_two_means_lacks_is_found(self, gradient, metric):
        with pytest.raises(VerificationError, match="rows that only fill the batch up count"):
            self.fitted(self.step(gradient, metric), state())

    @pytest.mark.parametrize("refusal", [AssertionError, ZeroDivisionError("rows")])
    def test_a_step_that_takes_no_other_number_of_rows_is_compared_with_all(self, refusal):
        def step(state, batch):
            if batch["x"].shape[0] % 16:
                raise refusal
            return self.step(True, True)(state, batch)

        self.fitted(step, state())

    def test_a_mask_in_both_passes(self):
        self.fitted(self.step(True, True), state())

    @pytest.mark.parametrize("normalizes", [False, True])
    @pytest.mark.parametrize(("gradient", "metric"), [(True, False), (False, True), (True, True)])
    def test_nnx_steps(self, gradient, metric, normalizes):
        if gradient and metric:
            self.fitted(self.nnx_step(gradient, metric), self.objects(normalizes))
            return
        with pytest.raises(VerificationError, match="rows that only fill the batch up count"):
            self.fitted(self.nnx_step(gradient, metric), self.objects(normalizes))
