"""A classifier with flax's TrainState: `(state, batch) -> (state, metrics)`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16)(x))
        return nn.Dense(3)(x)


def load_batches(num_steps, batch_size):
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(6, 3))
    images = rng.normal(size=(num_steps, batch_size, 6)).astype(np.float32)
    return [{"image": x, "label": (x @ teacher).argmax(-1).astype(np.int32)} for x in images]


def main(strategy):
    model = MLP()
    params = model.init(jax.random.key(0), jnp.ones((1, 6)))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.3))

    @jax.jit
    # jdist: @jdist.distribute(strategy)
    def train_step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["image"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
            return loss, logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        # jdist: (loss, logits), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
        return state, {"loss": loss, "accuracy": accuracy}

    history = []
    for batch in load_batches(num_steps=6, batch_size=32):
        # jdist: for batch in strategy.distribute_dataset(load_batches(num_steps=6, batch_size=32)):
        state, metrics = train_step(state, batch)
        history.append(jax.device_get(metrics))
    return {"state": state, "losses": [float(m["loss"]) for m in history], "history": history}
