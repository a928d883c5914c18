"""flax's TrainState with optax's reduce_on_plateau, whose update takes the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState


def load_batches(num_steps, batch_size):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_steps, batch_size, 6)).astype(np.float32)
    return [{"x": each, "y": each.sum(-1) + rng.normal(size=batch_size).astype(np.float32)} for each in x]


def main(strategy):
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
    params = {"w": jnp.zeros(6), "b": jnp.zeros(())}
    state = TrainState.create(apply_fn=None, params=params, tx=tx)

    @jax.jit
    # jdist: @jdist.distribute(strategy)
    def train_step(state, batch):
        def loss_fn(params):
            return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        # jdist: loss, grads = jdist.value_and_grad(loss_fn)(state.params)
        updates, opt_state = state.tx.update(grads, state.opt_state, state.params, value=loss)
        params = optax.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), {"loss": loss}

    losses = []
    for batch in load_batches(num_steps=12, batch_size=16):
        # jdist: for batch in strategy.distribute_dataset(load_batches(num_steps=12, batch_size=16)):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return {"state": state, "losses": losses}
