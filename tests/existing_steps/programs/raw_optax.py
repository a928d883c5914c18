"""No library for the model: the state is a dict, and the step returns it alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

optimizer = optax.chain(optax.add_decayed_weights(1e-3), optax.sgd(0.2, momentum=0.9))


def init(key):
    k1, k2 = jax.random.split(key)
    params = [
        {"w": jax.random.normal(k1, (6, 16)) / 6**0.5, "b": jnp.zeros(16)},
        {"w": jax.random.normal(k2, (16, 1)) / 16**0.5, "b": jnp.zeros(1)},
    ]
    return {"params": params, "opt": optimizer.init(params), "loss": jnp.zeros(())}


def forward(params, x):
    *hidden, last = params
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x @ last["w"] + last["b"])[:, 0]


def main(strategy):
    rng = np.random.default_rng(4)
    xs = rng.normal(size=(6, 32, 6)).astype(np.float32)
    batches = [{"x": x, "y": np.sin(x.sum(-1))} for x in xs]

    @jax.jit
    # jdist: @jdist.distribute(strategy)
    def step(state, batch):
        def loss_fn(params):
            return jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        # jdist: loss, grads = jdist.value_and_grad(loss_fn)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "loss": loss}

    state = init(jax.random.key(0))
    losses = []
    for _ in range(2):
        for batch in batches:
            # jdist: for batch in strategy.distribute_dataset(batches):
            state = step(state, batch)
            losses.append(float(state["loss"]))
    return {"state": state, "losses": losses}
