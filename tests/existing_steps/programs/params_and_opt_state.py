"""The commonest step of all: parameters and the optimiser's state are arguments of their own, and come back beside the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.2, momentum=0.9))


def init(key):
    k1, k2 = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.normal(k1, (6, 16)) / 6**0.5, "b": jnp.zeros(16)},
        "last": {"w": jax.random.normal(k2, (16, 1)) / 16**0.5, "b": jnp.zeros(1)},
    }


def forward(params, x):
    x = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return (x @ params["last"]["w"] + params["last"]["b"])[:, 0]


def main(strategy):
    rng = np.random.default_rng(4)
    xs = rng.normal(size=(6, 32, 6)).astype(np.float32)
    batches = [{"x": x, "y": np.sin(x.sum(-1))} for x in xs]

    @jax.jit
    # jdist: @jdist.distribute(strategy, args=("state", "state", "batch"))
    def step(params, opt_state, batch):
        def loss_fn(params):
            return jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        # jdist: loss, grads = jdist.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, loss

    params = init(jax.random.key(0))
    opt_state = optimizer.init(params)
    losses = []
    for _ in range(2):
        for batch in batches:
            # jdist: for batch in strategy.distribute_dataset(batches):
            params, opt_state, loss = step(params, opt_state, batch)
            losses.append(float(loss))
    return {"state": (params, opt_state), "losses": losses}
