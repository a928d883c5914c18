"""Logs norms of the gradients, the updates and the updated parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(optax.cosine_decay_schedule(0.3, 20), momentum=0.9))


def main(strategy):
    rng = np.random.default_rng(9)
    xs = rng.normal(size=(8, 16, 5)).astype(np.float32)
    batches = [(x, (x[:, 0] > x[:, 1]).astype(np.float32)) for x in xs]
    params = {"w": jnp.zeros(5), "b": jnp.zeros(())}
    state = (params, tx.init(params))

    def train_step(state, batch):
        params, opt_state = state
        x, y = batch

        def loss_fn(params):
            return optax.sigmoid_binary_cross_entropy(x @ params["w"] + params["b"], y).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        # jdist: loss, grads = jdist.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        logs = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "update_norm": optax.tree.norm(updates),
            "param_norm": optax.tree.norm(params),
        }
        return (params, opt_state), logs

    train_step = jax.jit(train_step, donate_argnums=0)
    # jdist: train_step = jdist.distribute(train_step, strategy)
    logs = []
    for batch in batches:
        # jdist: for batch in strategy.distribute_dataset(batches):
        state, log = train_step(state, batch)
        logs.append(jax.tree.map(float, log))
    return {"state": state, "losses": [log["loss"] for log in logs], "logs": logs}
