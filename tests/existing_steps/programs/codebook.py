"""A codebook by averages, as VQ-VAE trains it: each code moves to the mean of its rows, gradients train the encoder."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

optimizer = optax.sgd(0.1)


def average(old, new):
    return 0.9 * old + 0.1 * new
    # jdist: return 0.9 * old + 0.1 * jdist.all_reduce(new, "sum")


def main(strategy):
    rng = np.random.default_rng(7)
    centres, kinds = rng.normal(size=(4, 6)), rng.integers(4, size=(12, 32))
    batches = [{"x": x} for x in (centres[kinds] + 0.1 * rng.normal(size=(12, 32, 6))).astype(np.float32)]

    @jax.jit
    # jdist: @jdist.distribute(strategy)
    def train_step(state, batch):
        def loss_fn(params):
            z = batch["x"] @ params["encoder"]
            distances = ((z[:, None] - state["codes"]) ** 2).sum(-1)
            chosen = jax.nn.one_hot(distances.argmin(-1), len(state["codes"]))
            quantised = z + jax.lax.stop_gradient(chosen @ state["codes"] - z)
            loss = ((quantised @ params["decoder"] - batch["x"]) ** 2).mean() + 0.25 * distances.min(-1).mean()
            return loss, (chosen, jax.lax.stop_gradient(z))

        (loss, (chosen, z)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        # jdist: (loss, (chosen, z)), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state["params"])
        counts = average(state["counts"], chosen.sum(0))
        sums = average(state["sums"], chosen.T @ z)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        codes = sums / jnp.maximum(counts, 1e-3)[:, None]
        return {"params": params, "opt_state": opt_state, "counts": counts, "sums": sums, "codes": codes}, {
            "loss": loss
        }

    params = {"encoder": rng.normal(size=(6, 2)) / 6**0.5, "decoder": rng.normal(size=(2, 6)) / 2}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    codes = jnp.asarray(rng.normal(size=(4, 2)), jnp.float32)
    state = {
        "params": params,
        "opt_state": optimizer.init(params),
        "counts": jnp.full(4, 8.0),
        "sums": 8 * codes,
        "codes": codes,
    }
    losses = []
    for batch in batches:
        # jdist: for batch in strategy.distribute_dataset(batches):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return {"state": state, "losses": losses}
