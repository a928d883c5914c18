"""A text classifier on buckets of lengths: plain jit compiles one program for each length."""

import jax
import numpy as np
import optax


def load_batches(num_steps, tokens):
    rng = np.random.default_rng(0)
    for step in range(num_steps):
        length = (4, 8, 16)[step % 3]
        words = rng.integers(0, 32, (tokens // length, length)).astype(np.int32)
        yield {"words": words, "label": (words.mean(1) > 15.5).astype(np.int32)}


def main(strategy):
    keys = jax.random.split(jax.random.key(0))
    params = {"table": jax.random.normal(keys[0], (32, 8)), "out": 0.1 * jax.random.normal(keys[1], (8, 2))}

    @jax.jit
    # jdist: @jdist.distribute(strategy)
    def train_step(params, batch):
        def loss_fn(params):
            logits = params["table"][batch["words"]].mean(1) @ params["out"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        # jdist: loss, grads = jdist.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 2.0 * g, params, grads), {"loss": loss}

    losses = []
    for batch in load_batches(num_steps=12, tokens=1024):
        # jdist: for batch in strategy.distribute_dataset(load_batches(num_steps=12, tokens=1024), shapes=3):
        params, metrics = train_step(params, batch)
        losses.append(float(metrics["loss"]))
    return {"state": params, "losses": losses}
