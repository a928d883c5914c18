"""Dropout by a key that the loop makes: `(state, batch, key) -> (state, loss)`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState


class Regressor(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.tanh(nn.Dense(16)(x))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(1)(x)[:, 0]


def create_state(key):
    model = Regressor()
    params = model.init(key, jnp.ones((1, 6)), train=False)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.2))


def main(strategy):
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(64, 6)).astype(np.float32)
    targets = inputs @ rng.normal(size=6).astype(np.float32)
    batches = [(inputs[i : i + 32], targets[i : i + 32]) for i in (0, 32)] * 5
    key, init_key = jax.random.split(jax.random.key(0))
    state = create_state(init_key)

    def train_step(state, batch, key):
        x, y = batch
        dropout_key = jax.random.fold_in(key, state.step)

        def loss_fn(params):
            prediction = state.apply_fn({"params": params}, x, train=True, rngs={"dropout": dropout_key})
            return jnp.mean((prediction - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        # jdist: loss, grads = jdist.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    train_step = jax.jit(train_step)
    # jdist: train_step = jdist.distribute(train_step, strategy)
    losses = []
    for batch in batches:
        # jdist: for batch in strategy.distribute_dataset(batches):
        key, step_key = jax.random.split(key)
        state, loss = train_step(state, batch, step_key)
        losses.append(float(loss))
    return {"state": state, "losses": losses}
