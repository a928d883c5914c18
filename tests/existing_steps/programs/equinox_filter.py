"""Equinox in its own style: the model is the parameters, functions and settings are leaves of it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax


class Net(eqx.Module):
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(8, 3, 16, depth=2, activation=jnp.tanh, key=key)
        self.dropout = eqx.nn.Dropout(0.0)

    def __call__(self, x):
        return self.mlp(self.dropout(x))


optim = optax.sgd(0.3, momentum=0.9)


def loss_fn(model, x, y):
    logits = jax.vmap(model)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def main(strategy):
    @eqx.filter_jit
    # jdist: @jdist.distribute(strategy)
    def make_step(state, batch):
        model, opt_state = state
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch["x"], batch["y"])
        # jdist: loss, grads = jdist.value_and_grad(loss_fn, using=eqx.filter_value_and_grad)(model, batch["x"], batch["y"])
        updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        model = eqx.apply_updates(model, updates)
        return (model, opt_state), loss

    rng = np.random.default_rng(3)
    xs = rng.normal(size=(10, 32, 8)).astype(np.float32)
    batches = [{"x": x, "y": x[:, :3].argmax(-1)} for x in xs]
    model = Net(jax.random.key(0))
    state = (model, optim.init(eqx.filter(model, eqx.is_array)))
    losses = []
    for batch in batches:
        # jdist: for batch in strategy.distribute_dataset(batches):
        state, loss = make_step(state, batch)
        losses.append(float(loss))
    return {"state": eqx.filter(state, eqx.is_array), "losses": losses}
