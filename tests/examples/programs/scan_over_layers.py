"""Twelve residual blocks as one, scanned over layers and recomputed in the backward pass (`nn.scan`, `nn.remat`)."""

import flax.linen as nn
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jdist
from tests.examples.training import digits, train

LAYERS = 12


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.LayerNorm()(x)
        h = nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(2 * x.shape[-1])(h)))
        return x + h / LAYERS, None


class Deep(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        x, _ = layers()(nn.Dense(16)(x), None)
        return nn.Dense(10)(x)


model = Deep()


def create_state(key):
    params = model.init(key, jnp.zeros((1, 64)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.3))


def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jdist.mean(losses, batch["mask"])

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def main(strategy):
    state, history = train(strategy, create_state, train_step, digits(5), 6)
    return {"state": state, "losses": history["loss"]}
