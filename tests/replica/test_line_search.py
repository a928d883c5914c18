"""optax's line searches, which evaluate the loss inside of the optimiser."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.errors import StepError

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
DATA = {"x": X, "y": 2 * X[:, 0]}


def trained(strategy, tx):
    """The parameters after six steps, each of which hands the line search the loss of the whole batch."""

    @jdist.distribute(strategy)
    def train_step(state, batch):
        def loss_fn(params):
            return jdist.mean((batch["x"] @ params["w"] - batch["y"]) ** 2, batch["mask"])

        def whole(params):
            return jdist.all_reduce(loss_fn(params), "mean")

        loss, grads = jdist.value_and_grad(loss_fn)(state.params)
        value = jdist.all_reduce(loss, "mean")
        updates, opt_state = tx.update(grads, state.opt_state, state.params, value=value, grad=grads, value_fn=whole)
        return state.replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state), {"loss": loss}

    state = strategy.init(lambda: jdist.TrainState.create(params={"w": jnp.zeros(3)}, tx=tx))
    for batch in strategy.distribute_dataset(jdist.data.from_arrays(DATA, global_batch=8, epochs=6)):
        state, _ = train_step(state, batch)
    train_step.wait()
    return strategy.fetch(state).params["w"]


def two(**options):
    return jdist.mirrored(jax.devices()[:2], **options)


def test_one_that_looks_at_the_loss_alone_searches_with_that_of_the_whole_batch():
    tx = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15))
    np.testing.assert_allclose(trained(two(), tx), trained(jdist.one_device(), tx), rtol=1e-5)


def test_one_that_takes_gradients_is_noticed_and_is_right_in_the_global_view():
    with pytest.raises(StepError, match=r"with a condition on a replica's own rows.*jdist\.global_loss"):
        trained(two(), optax.lbfgs())
    alone = trained(jdist.one_device(), optax.lbfgs())
    # Six steps of a search that divides by differences of gradients: rounding grows.
    np.testing.assert_allclose(trained(two(transform="jit"), optax.lbfgs()), alone, rtol=1e-3, atol=1e-4)
