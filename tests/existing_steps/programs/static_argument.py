"""A static argument decides what is traced: `(state, batch, key, num_classes) -> (state, metrics)`."""

from functools import partial

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState


class Classifier(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(nn.relu(nn.Dense(12)(x)))


def main(strategy):
    rng = np.random.default_rng(2)
    images = rng.normal(size=(96, 5)).astype(np.float32)
    labels = (images[:, :4] * [1.0, 2.0, 1.0, 2.0]).argmax(-1)
    batches = [{"x": images[i : i + 16], "y": labels[i : i + 16]} for i in range(0, 96, 16)]

    model = Classifier(num_classes=4)
    params = model.init(jax.random.PRNGKey(0), images[:1])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.2, momentum=0.5))

    @partial(jax.jit, static_argnums=3)
    # jdist: @jdist.distribute(strategy, args=("state", "batch", "replicated", "static"))
    def train_step(state, batch, key, num_classes):
        smoothing = 0.1 * jax.random.uniform(key)
        labels = optax.smooth_labels(jax.nn.one_hot(batch["y"], num_classes), smoothing)

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["x"])
            return optax.softmax_cross_entropy(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        # jdist: loss, grads = jdist.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "smoothing": smoothing}

    key = jax.random.PRNGKey(1)
    losses, smoothings = [], []
    for step, batch in enumerate(batches):
        # jdist: for step, batch in enumerate(strategy.distribute_dataset(batches)):
        state, metrics = train_step(state, batch, jax.random.fold_in(key, step), 4)
        losses.append(float(metrics["loss"]))
        smoothings.append(float(metrics["smoothing"]))
    return {"state": state, "losses": losses, "smoothings": smoothings}
