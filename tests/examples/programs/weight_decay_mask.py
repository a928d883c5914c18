"""Decay of kernels but not of biases and scales, by a mask, under a warmed-up rate that is logged (`inject_hyperparams`)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jdist
from tests.examples.training import digits, train


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.LayerNorm()(nn.Conv(8, (3, 3), strides=2)(x)))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


def decayed(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


@optax.inject_hyperparams
def optimizer(learning_rate, weight_decay):
    return optax.chain(
        optax.masked(optax.add_decayed_weights(weight_decay), decayed), optax.sgd(learning_rate, momentum=0.9)
    )


model = CNN()
tx = optimizer(learning_rate=optax.warmup_cosine_decay_schedule(0.0, 0.2, 3, 8), weight_decay=0.05)


def create_state(key):
    params = model.init(key, jnp.zeros((1, 8, 8, 1)))["params"]
    return jdist.TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["image"].reshape(-1, 8, 8, 1))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jdist.mean(losses, batch["mask"])

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    state = state.apply_gradients(grads=grads)
    return state, {"loss": loss, "learning_rate": state.opt_state.hyperparams["learning_rate"]}


def main(strategy):
    state, history = train(strategy, create_state, train_step, digits(1), 1)
    return {"state": state, "losses": history["loss"], "rates": history["learning_rate"]}
