"""A GAN whose networks take turns, a step each: the generator's gradient goes through the discriminator just updated."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import jdist

ROWS, LATENT = 240, 8

generator = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(64), nn.sigmoid])
discriminator = nn.Sequential([nn.Dense(32), nn.leaky_relu, nn.Dense(1)])


def create_states(key):
    keys = jax.random.split(key)
    return {
        "generator": TrainState.create(
            apply_fn=generator.apply, params=generator.init(keys[0], jnp.zeros((1, LATENT))), tx=optax.sgd(0.1)
        ),
        "discriminator": TrainState.create(
            apply_fn=discriminator.apply, params=discriminator.init(keys[1], jnp.zeros((1, 64))), tx=optax.sgd(0.2)
        ),
    }


def discriminator_step(states, batch):
    g, d = states["generator"], states["discriminator"]

    def loss_fn(params):
        real = d.apply_fn(params, batch["image"])[:, 0]
        fake = d.apply_fn(params, g.apply_fn(g.params, batch["latent"]))[:, 0]
        return jdist.mean(nn.softplus(-real) + nn.softplus(fake), batch["mask"])

    loss, grads = jdist.value_and_grad(loss_fn)(d.params)
    return {**states, "discriminator": d.apply_gradients(grads=grads)}, {"loss": loss}


def generator_step(states, batch):
    g, d = states["generator"], states["discriminator"]

    def loss_fn(params):
        return jdist.mean(nn.softplus(-d.apply_fn(d.params, g.apply_fn(params, batch["latent"]))[:, 0]), batch["mask"])

    loss, grads = jdist.value_and_grad(loss_fn)(g.params)
    return {**states, "generator": g.apply_gradients(grads=grads)}, {"loss": loss}


def main(strategy):
    latent = jax.random.normal(jax.random.key(5), (ROWS, LATENT))
    arrays = {"image": load_digits().data[:ROWS].astype("float32") / 16, "latent": latent}
    dataset = jdist.data.from_arrays(arrays, global_batch=64, shuffle_seed=4, epochs=2)
    states = strategy.init(create_states, jax.random.key(4))
    train_d, train_g = (jdist.distribute(step, strategy) for step in (discriminator_step, generator_step))
    losses, losses_g = [], []
    for batch in strategy.distribute_dataset(dataset):
        states, metrics = train_d(states, batch)
        losses.append(metrics["loss"])
        states, metrics = train_g(states, batch)
        losses_g.append(metrics["loss"])
    return {
        "state": strategy.fetch(states),
        "losses": [float(loss) for loss in losses],
        "losses_g": [float(loss) for loss in losses_g],
    }
