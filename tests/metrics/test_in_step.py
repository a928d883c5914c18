"""Metrics on the replicas: what leaves a step is that of the global batch, whole and exact."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist
from jdist.errors import StepError
from jdist.metrics.in_step import weights


def evaluator(strategy, metric):
    return jdist.distribute(
        lambda batch: metric.update(batch["x"], batch["y"], batch["mask"]),
        strategy,
        args=("batch",),
        returns=("metrics",),
    )


def test_rows_of_an_odd_number_of_replicas_come_out_bit_for_bit():
    """A mean over three replicas would round; no row may move, be lost, or come twice."""
    strategy, metric = jdist.mirrored(jax.devices()[:3]), jdist.metrics.auc()
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=20).astype(np.float32), "y": rng.integers(0, 2, 20)}
    step = evaluator(strategy, metric)
    source = jdist.data.from_arrays(arrays, global_batch=9)
    total = metric.total(step(batch) for batch in strategy.distribute_dataset(source))
    assert [len(rows["score"]) for rows in total] == [9, 9, 2]
    np.testing.assert_array_equal(np.concatenate([rows["score"] for rows in total]), arrays["x"])
    np.testing.assert_array_equal(np.concatenate([rows["label"] for rows in total]), arrays["y"])


@pytest.mark.parametrize("transform", ["shard_map", "pmap", "jit"])
def test_counts_within_a_step_are_exact_where_float32_is_not(transform):
    strategy, metric = jdist.mirrored(transform=transform), jdist.metrics.mean()
    step = jdist.distribute(
        lambda batch: metric.update(batch["right"], batch["mask"]), strategy, args=("batch",), returns=("metrics",)
    )
    mask = np.array([2**24, 1, 1, 1, 0, 0, 0, 0], np.int32)  # in float32 the three ones would be lost, or be four
    found = step({"right": np.ones(8, bool), "mask": mask})
    assert found["total"].dtype == jnp.int32
    assert int(found["total"]) == int(found["weight"]) == 2**24 + 3


def test_fractions_weigh_rows():
    strategy, metric = jdist.mirrored(), jdist.metrics.accuracy()
    mask = np.array([0.5, 2.0, 0.0, 1.5, 0, 0, 0, 0], np.float32)
    labels = np.array([0, 1, 1, 1, 0, 0, 0, 0])
    found = evaluator(strategy, metric)({"x": np.array([0, 1, 1, 0, 1, 1, 1, 1]), "y": labels, "mask": mask})
    assert metric.compute(found) == 2.5 / 4.0


def test_without_a_strategy_and_without_a_mask_it_is_plain_jax():
    metric = jdist.metrics.auc()
    found = jax.jit(metric.update)(jnp.array([0.1, 0.9]), jnp.array([0, 1]))
    assert metric.compute(found) == 1.0


@pytest.mark.parametrize("make", [jdist.default, jdist.mirrored, lambda: jdist.mirrored(transform="jit")])
@pytest.mark.parametrize(
    "inside", [jax.jit, lambda f: lambda x: jax.grad(lambda x: (x.sum(), f(x)), has_aux=True)(x)[1]]
)
def test_inside_a_transform_of_the_steps_own_it_is_exact_as_well(make, inside):
    metric = jdist.metrics.mean()
    step = jdist.distribute(
        lambda batch: inside(metric.update)(batch["x"]), make(), args=("batch",), returns=("metrics",)
    )
    found = step({"x": np.arange(8, dtype=np.float32)})
    assert metric.compute(metric.total([found])) == 3.5


def test_in_a_step_over_nnx_objects():
    strategy, metric = jdist.mirrored(), jdist.metrics.accuracy()
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param)

    @jdist.nnx.distribute(strategy)
    def train_step(model, optimizer, batch):
        def loss_fn(model):
            logits = model(batch["x"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            return jdist.mean(losses, batch["mask"]), logits

        (_, logits), grads = jdist.nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        return metric.update(logits, batch["y"], batch["mask"])

    rng = np.random.default_rng(1)
    arrays = {"x": rng.normal(size=(21, 4)).astype(np.float32), "y": rng.integers(0, 3, 21)}
    right = (np.asarray(model(arrays["x"])).argmax(-1) == arrays["y"]).mean()
    source = jdist.data.from_arrays(arrays, global_batch=16)
    total = metric.total(train_step(model, optimizer, batch) for batch in strategy.distribute_dataset(source))
    assert metric.compute(total) == right


def test_a_mask_of_rows_weighs_all_elements_of_a_row():
    metric = jdist.metrics.mean()
    values, mask = jnp.arange(8.0).reshape(2, 4), jnp.array([True, False])
    assert metric.compute(metric.update(values, mask)) == 1.5
    assert metric.compute(metric.update(values, jnp.ones((2, 4), bool).at[1].set(False))) == 1.5


def test_more_elements_than_can_be_counted_are_refused():
    many = jax.ShapeDtypeStruct((2**28,), jnp.bool_)
    metric = jdist.metrics.mean()
    jax.eval_shape(metric.update, many)
    with pytest.raises(StepError, match=r"a global batch has 268,435,456 x 8 elements, .* smaller global batches"):
        jdist.mirrored().run(lambda: jax.eval_shape(lambda x: weights("jdist.metrics.mean", None, x.shape), many))
