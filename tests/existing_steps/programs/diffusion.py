"""A denoising step: noise and its strength are drawn for every row from a key in the state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax


def load_batches(num_steps, batch_size):
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(batch_size, 4)).astype(np.float32)} for _ in range(num_steps)]


def main(strategy):
    tx = optax.sgd(0.05)
    params = {"w": jnp.zeros((4, 4)), "t": jnp.zeros(4)}
    state = {"params": params, "opt": tx.init(params), "key": jax.random.key(0)}

    @jax.jit
    # jdist: @jdist.distribute(strategy)
    def train_step(state, batch):
        key, own = jax.random.split(state["key"])
        keys = jax.random.split(own)
        # jdist: keys = jax.random.split(jdist.replica_rng(own))
        noise = jax.random.normal(keys[0], batch["x"].shape)
        time = jax.random.uniform(keys[1], (len(batch["x"]), 1))
        noisy = jnp.sqrt(1 - time) * batch["x"] + jnp.sqrt(time) * noise

        def loss_fn(params):
            return ((noisy @ params["w"] + time * params["t"] - noise) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        # jdist: loss, grads = jdist.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "key": key}, {"loss": loss}

    losses = []
    for batch in load_batches(num_steps=8, batch_size=64):
        # jdist: for batch in strategy.distribute_dataset(load_batches(num_steps=8, batch_size=64)):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return {"state": state, "losses": losses}
