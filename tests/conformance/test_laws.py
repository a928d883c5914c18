"""Two laws of docs/step_laws.md: microbatches are replicas in time, and the global view is one replica, for each call of jdist.

Each step below is run on four replicas, and on fewer with as many microbatches; and in the global view, against one device.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from tests.by_default import some
from tests.toys import masked_batch, numbers

BATCH = masked_batch()
STEPS = {}


def step(function):
    STEPS[function.__name__] = function
    return function


def create():
    return {
        "params": {"w": jnp.array([1.0, -2.0, 0.5])},
        "n": jnp.int32(0),
        "ema": jnp.float32(1.0),
        "key": jax.random.key(0),
    }


def updated(state, grads, **more):
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {**state, "params": params, "n": state["n"] + 1, **more}


def step_of(loss_fn):
    def function(state, batch):
        loss, grads = jdist.value_and_grad(lambda params: loss_fn(params, batch))(state["params"])
        return updated(state, grads), {"loss": loss}

    function.__name__ = loss_fn.__name__
    return step(function)


def losses(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def masked(batch):
    return lambda params: jdist.mean(losses(params, batch), batch["mask"])


@step_of
def contrastive_over_gathered_rows(params, batch):
    z = jnp.tanh(batch["x"] * params["w"])
    labels = jdist.replica_id() * z.shape[0] + jnp.arange(z.shape[0])
    return optax.softmax_cross_entropy_with_integer_labels(z @ jdist.all_gather(z).T, labels).mean()


@step
def gathered_along_the_second_axis(state, batch):
    def loss_fn(params):
        columns = jdist.all_gather((batch["x"] * params["w"]).T, axis=1)
        return (jnp.cumsum(columns, 1) ** 2).mean() + (columns[0] * jnp.arange(16)).mean()

    loss, grads = jdist.value_and_grad(loss_fn)(state["params"])
    return updated(state, grads), {"loss": loss, "rows": jdist.all_gather(batch["y"])}


@step
def normalised_by_tokens(state, batch):
    total = jdist.all_reduce(batch["mask"].sum(), "sum")
    loss, grads = jdist.value_and_grad(lambda p: (losses(p, batch) * batch["mask"]).sum() / total, op="sum")(
        state["params"]
    )
    return updated(state, grads), {
        "loss": loss,
        "tokens": total,
        "cast": total.astype(jnp.float32),
        "ratio": jdist.all_reduce(batch["y"].sum(), "sum") / total,
        "twice": 2 * jdist.all_reduce(batch["y"].max(), "max"),
        "least": jdist.all_reduce(batch["y"].min(), "min"),
    }


@step
def divided_by_all_rows(state, batch):
    rows = batch["y"].shape[0] * jdist.num_replicas()
    loss, grads = jdist.value_and_grad(lambda p: losses(p, batch).sum() / rows, op="sum")(state["params"])
    average, _ = jdist.value_and_grad(lambda p: jdist.compute_average_loss(losses(p, batch)), op="sum")(state["params"])
    penalty, _ = jdist.value_and_grad(lambda p: jdist.scale_regularization_loss(p["w"] ** 2), op="sum")(state["params"])
    return updated(state, grads), {"loss": loss, "average": average, "penalty": penalty}


@step_of
def weighted_by_the_parameters(params, batch):
    return jdist.mean(losses(params, batch), jnp.exp(batch["x"] @ params["w"]))


@step
def weighted_by_a_running_mean(state, batch):
    ema = 0.9 * state["ema"] + 0.1 * jdist.all_reduce(batch["y"].mean())
    loss, grads = jdist.value_and_grad(lambda p: jdist.mean(losses(p, batch), jnp.abs(batch["y"]) + ema))(
        state["params"]
    )
    return updated(state, grads, ema=ema), {"loss": loss, "ema": ema}


@step
def sharpness_aware(state, batch):
    grads = jdist.grad(masked(batch))(state["params"])
    norm = optax.tree.norm(grads)
    away = jax.tree.map(lambda p, g: p + 0.05 * g / norm, state["params"], grads)
    loss, grads = jdist.value_and_grad(masked(batch))(away)
    return updated(state, grads), {"loss": loss, "norm": norm}


@step
def looked_at_after_the_update(state, batch):
    loss, grads = jdist.value_and_grad(masked(batch))(state["params"])
    new = updated(state, grads)
    largest = jdist.all_reduce(losses(new["params"], batch).max(), "max")
    return new, {"loss": loss, "after": masked(batch)(new["params"]), "largest": largest}


@step
def noise_of_each_replica(state, batch):
    keep = jax.random.bernoulli(jdist.replica_rng(state["key"]), 0.5, batch["x"].shape)
    kept = {**batch, "x": batch["x"] * keep}
    loss, grads = jdist.value_and_grad(masked(kept))(state["params"])
    return updated(state, grads), {"loss": loss, "kept": jdist.PerReplica(keep.sum())}


@step
def scaled_by_totals(state, batch):
    largest = jdist.all_reduce(jnp.abs(batch["y"]).max(), "max")
    loss, grads = jdist.value_and_grad(lambda p: jdist.mean(losses(p, batch)) / largest)(state["params"])
    deviation = jnp.sqrt(jdist.all_reduce((batch["y"] ** 2).mean()) - jdist.all_reduce(batch["y"].mean()) ** 2)
    first = jdist.aggregate(batch["y"][0], "first")
    return updated(state, grads, ema=deviation), {"loss": loss, "deviation": deviation, "first": first}


@step
def led_by_one_replica(state, batch):
    scale, last = jdist.broadcast(batch["y"][0], source=0), jdist.num_replicas() - 1

    def loss_fn(params):
        target = jdist.broadcast(jnp.tanh(batch["x"][-1] @ params["w"]), last)  # by the last replica's last row
        return masked(batch)(params) + (scale * params["w"]).sum() * target * jdist.mean(batch["y"])

    loss, grads = jdist.value_and_grad(loss_fn)(state["params"])
    return updated(state, grads, ema=scale), {"loss": loss, "last": jdist.broadcast(batch["y"][-1], last)}


def of_rows(batch):
    return lambda params, x: masked({**batch, "x": x})(params)


@step
def trained_on_rows_moved_by_their_gradients(state, batch):
    params, x = state["params"], batch["x"]
    for _ in range(2):
        x += 0.1 * jnp.sign(jdist.grad(of_rows(batch), argnums=1)(params, x))
    x += 4 * jax.jit(jdist.grad(of_rows(batch), argnums=1))(params, x)
    loss, (grads, by_x) = jdist.value_and_grad(of_rows(batch), argnums=(0, 1))(params, x)
    summed = jdist.value_and_grad(lambda x: losses(params, {**batch, "x": x}).sum(), op="sum")(x)[1]
    return updated(state, grads), {
        "loss": loss,
        "by_x": jdist.all_reduce((by_x**2).sum(), "sum"),
        "all": jdist.all_gather(by_x),
        "summed": jdist.all_gather(summed),
    }


@step_of
def penalised_by_the_gradients_of_rows(params, batch):
    by_x = jdist.grad(of_rows(batch), argnums=1)(params, batch["x"])
    return masked(batch)(params) + jdist.mean((by_x**2).sum(-1))


@step_of
def penalised_by_the_gradient(params, batch):
    return masked(batch)(params) + 0.1 * (jdist.grad(masked(batch))(params)["w"] ** 2).sum()


@step_of
def looking_ahead_by_an_inner_gradient(params, batch):
    ahead = jax.tree.map(lambda p, g: p - 0.1 * g, params, jdist.grad(masked(batch))(params))
    return masked(batch)(ahead)


@step_of
def with_a_variance_of_all_rows(params, batch):
    z = jnp.tanh(batch["x"] @ params["w"])
    variance = jdist.all_reduce(((z - jdist.all_reduce(z.mean())) ** 2).mean())
    return masked(batch)(params) + 1 / (0.1 + variance)


@step
def written_in_place(state, batch):
    loss, grads = jdist.value_and_grad(masked(batch))(state["params"])
    state["params"]["w"] = state["params"]["w"] - 0.1 * grads["w"]
    state["n"] += 1
    return state, {"loss": loss}


@step
def counting_rows(state, batch):
    loss, grads = jdist.value_and_grad(masked(batch))(state["params"])
    n = jdist.aggregate(state["n"] + batch["mask"].sum(), "sum", old=state["n"])
    ema = jdist.aggregate(0.9 * state["ema"] + batch["y"].mean(), "mean")
    return updated(state, grads, n=n, ema=ema), {"loss": loss, "each": jdist.aggregate(batch["y"].sum(), "per_replica")}


@step
def clipping_the_gradient_of_each_example(state, batch):
    def loss_fn(params, x, y):
        return (x @ params["w"] - y) ** 2

    each = jax.vmap(jax.grad(loss_fn), (None, 0, 0))(state["params"], batch["x"], batch["y"])["w"]
    clipped = each / jnp.maximum(1.0, jnp.linalg.norm(each, axis=1, keepdims=True))
    noise = 0.01 * jax.random.normal(state["key"], (3,))
    return updated(state, {"w": jdist.all_reduce(clipped.mean(0)) + noise}), {
        "norm": jnp.linalg.norm(each, axis=1).mean()
    }


@step
def adding_to_a_multiplier(state, batch):
    def loss_fn(params):
        violation = (losses(params, batch) - 0.5).mean()
        return losses(params, batch).mean() + state["ema"] * violation, violation

    (loss, violation), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state["params"])
    return updated(state, grads, ema=jdist.aggregate(state["ema"] + 0.1 * violation, "mean")), {"loss": loss}


@step
def remembering_what_follows_from_a_combined_value(state, batch):
    loss, grads = jdist.value_and_grad(masked(batch))(state["params"])
    level = jdist.all_reduce((batch["x"] ** 2).mean())
    halved = jnp.where(level < 1.1, 0.5 * state["ema"], state["ema"])
    return updated(state, grads, ema=halved + 0.1 * jnp.exp(level), n=state["n"] + (level < 1.1)), {"loss": loss}


@step
def measured_by_metrics(state, batch):
    def loss_fn(params):
        return masked(batch)(params), batch["x"] @ params["w"]

    (loss, scores), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state["params"])
    labels = (batch["y"] > 0).astype(jnp.int32)
    accuracy = jdist.metrics.accuracy(threshold=0.0).update(scores, labels, batch["mask"])
    return updated(state, grads), {
        "loss": loss,
        "accuracy": accuracy,
        "auc": jdist.metrics.auc().update(scores, labels),
    }


@step
def reduced_inside_jit(state, batch):
    total = jax.jit(lambda x: jdist.all_reduce(x, "sum"))
    loss, grads = jdist.value_and_grad(
        lambda p: losses(p, batch).sum() / total(jnp.float32(batch["y"].size)), op="sum"
    )(state["params"])
    return updated(state, grads), {"loss": loss, "rows": total(batch["mask"].sum())}


class OverwriteWithGradient:
    """Haliax' mark of what its "gradient" replaces, by name."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Maximum(OverwriteWithGradient):
    """The largest feature so far, as a layer in 8 bits keeps it."""

    value: jax.Array


@jax.custom_vjp
def quantized(x, largest):
    return x


quantized.defvjp(
    lambda x, largest: (x, (x, largest)),
    lambda kept, g: (g, Maximum(jnp.maximum(kept[1].value, jnp.abs(kept[0]).max()))),
)


@step
def in_eight_bits(state, batch):
    params = {**state["params"], "largest": Maximum(state["ema"])}
    loss, grads = jdist.value_and_grad(
        lambda p: masked({**batch, "x": quantized(batch["x"], p["largest"])})(p),
    )(params)
    return updated(state, {"w": grads["w"]}, ema=grads["largest"].value), {"loss": loss}


def constants(state, batch):
    loss, grads = jdist.value_and_grad(masked(batch))(state["params"])
    return updated(state, grads), {"loss": loss, "n": state["n"], "rows": batch["y"].shape[0], "rate": 0.1}


STEPS["constants"] = constants


def result(function, strategy, accumulate=1, **options):
    run, state = jdist.distribute(function, strategy, accumulate=accumulate, **options), create()
    for _ in range(2):
        state, metrics = run(state, BATCH)
    return numbers(strategy.fetch(state)), numbers(metrics)


@functools.cache
def on_four(name):
    return result(STEPS[name], jdist.mirrored(cpus(4)))


@functools.cache
def on_one_device(name):
    return result(STEPS[name], jdist.one_device())


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def cpus(n):
    return [f"cpu:{i}" for i in range(n)]


def each_step(names=STEPS):
    """All cases of a step go to one process of the tests', which computes what they are compared with once."""
    params = [pytest.param(name, marks=pytest.mark.xdist_group(f"law_{name}")) for name in names]
    return pytest.mark.parametrize("name", params)


FEWER = {
    "two in shard_map": lambda: (jdist.mirrored(cpus(2)), 2),
    "one device": lambda: (jdist.one_device(), 4),
    "two in pmap": lambda: (jdist.mirrored(cpus(2), transform="pmap"), 2),
    "central_storage": lambda: (jdist.central_storage(cpus(2)), 2),
    "central_storage without microbatches": lambda: (jdist.central_storage(cpus(4)), 1),
    "two of two": lambda: (jdist.sharded(cpus(4), within=2, whole_below=0, most_whole=1), 1),
    "bucketed": lambda: (jdist.mirrored(cpus(2), all_reduce=jdist.reduction.bucketed(16)), 2),
}


@pytest.mark.parametrize("how", some(list(FEWER), ["two in shard_map", "central_storage", "two of two"]))
@each_step()
def test_microbatches_are_replicas_in_time(name, how):
    strategy, accumulate = FEWER[how]()
    assert_same(result(STEPS[name], strategy, accumulate), on_four(name))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", [name for name in STEPS if "of_rows" in name or "their_gradients" in name])
def test_gradients_by_rows_where_parameters_are_in_parts(name, accumulate):
    strategy = jdist.sharded(cpus(2), whole_below=0, most_whole=1)
    assert_same(result(STEPS[name], strategy, accumulate), on_one_device(name))


@pytest.mark.parametrize("accumulate", some([1, 2], [1]))
@each_step()
def test_the_global_view_is_one_replica(name, accumulate):
    expected = result(STEPS[name], jdist.one_device(), accumulate) if accumulate > 1 else on_one_device(name)
    assert_same(result(STEPS[name], jdist.mirrored(cpus(4), transform="jit"), accumulate), expected)


# What these steps return of their own rows or number is another thing on one replica, as it should be.
OWN = {"noise_of_each_replica", "counting_rows", "constants"}


@each_step(sorted(set(STEPS) - OWN))
def test_four_replicas_are_one_on_the_whole_batch(name):
    assert_same(on_four(name), on_one_device(name))


def test_the_maximum_that_travels_as_a_gradient_is_of_all_rows():
    for strategy, accumulate in ((jdist.mirrored(cpus(4)), 1), (jdist.sharded(cpus(2), whole_below=0), 2)):
        state, _ = result(STEPS["in_eight_bits"], strategy, accumulate)
        np.testing.assert_allclose(state["ema"], max(1.0, np.abs(BATCH["x"]).max()), rtol=1e-6)
