"""Losses divided by the global batch; the example values are those of `tf.nn`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.errors import StepError
from tests.toys import TRANSFORMS, TWO


class TestComputeAverageLoss:
    def test_divides_by_the_global_batch(self, two):
        """[1, 2] on one replica and [6] on the other, which is filled up with a row of weight 0."""
        losses = jdist.PerReplica(jnp.array([[1.0, 2.0], [6.0, 100.0]]))
        weights = jdist.PerReplica(jnp.array([[1.0, 1.0], [1.0, 0.0]]))
        parts = two.run(lambda x, w: jdist.compute_average_loss(x, w, global_batch=3), losses, weights)
        assert parts.value.tolist() == [1.0, 2.0]
        assert two.reduce("sum", parts) == 3.0

    @pytest.mark.parametrize(("own", "expected"), [([1.0, 2.0], 0.75), ([6.0], 3.0)])
    def test_by_default_by_its_own_rows_times_the_replicas(self, two, own, expected):
        assert two.run(jdist.compute_average_loss, np.array(own)).value.tolist() == [expected, expected]

    def test_outside_a_strategy(self):
        assert float(jdist.compute_average_loss(jnp.array([1.0, 2.0]))) == 1.5
        assert float(jdist.compute_average_loss(jnp.array([2, 4]), 0.5, jnp.int32(6))) == 0.5
        per_token = jnp.array([[1.0, 3.0], [5.0, 7.0]])
        assert float(jdist.compute_average_loss(per_token, jnp.array([1.0, 0.0]), global_batch=2)) == 2.0
        assert jdist.compute_average_loss(jnp.ones(4, jnp.bfloat16)).dtype == jnp.float32

    def test_in_a_scope_outside_a_step_only_with_the_global_batch(self):
        with TWO.scope():
            assert float(jdist.compute_average_loss(jnp.array([1.0, 2.0]), global_batch=3)) == 1.0
            with pytest.raises(StepError, match="compute_average_loss was called within"):
                jdist.compute_average_loss(jnp.array([1.0, 2.0]))

    def test_what_is_refused(self):
        with pytest.raises(StepError, match="`per_example_loss` is one scalar"):
            jdist.compute_average_loss(jnp.float32(1))
        with pytest.raises(StepError, match=r"`sample_weight` has shape \(3,\), `per_example_loss` has shape \(2,\)"):
            jdist.compute_average_loss(jnp.ones(2), jnp.ones(3))
        for wrong in (0, -1, 2.0, "2", True, jnp.ones(2, int), jnp.float32(2)):
            with pytest.raises(StepError, match=r"`global_batch` is .*positive integer"):
                jdist.compute_average_loss(jnp.ones(2), global_batch=wrong)

    @pytest.mark.parametrize("inside", [False, True])
    def test_no_rows_give_zero_as_in_tensorflow(self, two, inside):
        def average():
            return jdist.compute_average_loss(jnp.ones(0)), jdist.compute_average_loss(jnp.ones(0), global_batch=4)

        assert jax.tree.leaves(two.run(average).local_results()[0] if inside else average()) == [0, 0]

    def test_a_global_batch_of_zero_gives_zero_and_no_nan_in_the_gradient(self):
        @jax.jit
        @jax.value_and_grad
        def average(losses, global_batch):
            return jdist.compute_average_loss(losses, global_batch=global_batch)

        value, grad = average(jnp.ones(2), jnp.int32(0))
        assert (float(value), grad.tolist()) == (0, [0, 0])
        assert float(average(jnp.ones(2), jnp.int32(4))[0]) == 0.5

    def test_what_are_no_losses_is_refused_by_name(self):
        for call, name in (
            (lambda x: jdist.compute_average_loss(x), "compute_average_loss: `per_example_loss`"),
            (lambda x: jdist.scale_regularization_loss(x), "scale_regularization_loss: `regularization_loss`"),
        ):
            with pytest.raises(StepError, match=f"jdist.{name} is None, a NoneType; it must be an array of numbers"):
                call(None)
            with pytest.raises(StepError, match=f"jdist.{name} is '1', a str"):
                call("1")
        with pytest.raises(StepError, match="`sample_weight` is 'text', a str"):
            jdist.compute_average_loss(jnp.ones(2), "text")


class TestScaleRegularizationLoss:
    def test_divides_by_the_replicas(self, two):
        parts = two.run(lambda: jdist.scale_regularization_loss(4.0))
        assert parts.value.tolist() == [2.0, 2.0]
        assert two.run(lambda: jdist.scale_regularization_loss(jnp.array([1, 3]))).value.tolist() == [2.0, 2.0]

    def test_outside_a_strategy(self):
        assert float(jdist.scale_regularization_loss(4.0)) == 4.0
        with TWO.scope(), pytest.raises(StepError, match="scale_regularization_loss was called within"):
            jdist.scale_regularization_loss(4.0)


X = np.arange(8, dtype=np.float32)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"steps_per_call": 1, "accumulate": 4}], ids=str)
@pytest.mark.parametrize("rows", [None, 8])
@pytest.mark.parametrize("name", ["default", "shard_map", "pmap", "jit"])
def test_a_step_of_parts_equals_one_of_the_whole_batch(name, rows, options):
    """Also with microbatches, of which each holds a part of its replica's part."""
    strategy = jdist.default() if name == "default" else TRANSFORMS[name]

    def step(w, x):
        def loss_fn(w):
            return jdist.compute_average_loss((w * x - 1) ** 2, global_batch=rows) + jdist.scale_regularization_loss(
                w**2
            )

        loss, grad = jdist.value_and_grad(loss_fn, op="sum")(w)
        return w - 0.01 * grad, {"loss": loss}

    w, metrics = jdist.distribute(step, strategy, **options)(np.float32(2), X)
    loss, grad = jax.value_and_grad(lambda w: ((w * X - 1) ** 2).mean() + w**2)(2.0)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(w, 2 - 0.01 * grad, rtol=1e-6)


def test_gradients_of_all_replicas_are_summed_before_sgd(two):
    """Each of 2 replicas has the gradient [1, 6, 7, 2]; SGD takes 0.5 x their sum off [1, 2, 3, 4]."""
    gradients = jnp.array([1.0, 6.0, 7.0, 2.0])
    tx = optax.sgd(0.5)

    def step(w, rows):
        _, grad = jdist.value_and_grad(lambda w: w @ gradients, op="sum")(w)
        updates, _ = tx.update(grad, tx.init(w))
        return optax.apply_updates(w, updates)

    assert jdist.distribute(step, two)(np.array([1, 2, 3, 4], np.float32), np.ones(2)).tolist() == [0, -4, -4, 2]
