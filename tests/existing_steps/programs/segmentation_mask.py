"""A segmentation network: each image has a `mask` of its own, the class of each pixel."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState


class PixelNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        return nn.Conv(3, (1, 1))(x)


def load_batches(num_steps, batch_size):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(num_steps, batch_size, 8, 8, 1)).astype(np.float32)
    return [{"image": x, "mask": np.digitize(x[..., 0], [-0.5, 0.5]).astype(np.int32)} for x in images]


def main(strategy):
    model = PixelNet()
    params = model.init(jax.random.key(0), jnp.ones((1, 8, 8, 1)))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.3))

    @jax.jit
    # jdist: @jdist.distribute(strategy)
    def train_step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["mask"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        # jdist: loss, grads = jdist.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    losses = []
    for batch in load_batches(num_steps=6, batch_size=16):
        # jdist: for batch, _ in strategy.distribute_dataset(load_batches(num_steps=6, batch_size=16), with_mask=True):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return {"state": state, "losses": losses}
