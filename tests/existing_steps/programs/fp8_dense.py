"""Dense layers in float8: flax keeps scales and histories of maxima, and replaces them by what comes back as their gradient."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen import fp8_ops
from flax.training.train_state import TrainState


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)(x))
        return nn.Dense(1, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)(x)[:, 0]


def main(strategy):
    rng = np.random.default_rng(6)
    sizes = np.linspace(0.1, 2, 32)[:, None]  # the largest rows are all in one replica's part
    xs = (sizes * rng.normal(size=(6, 32, 8))).astype(np.float32)
    batches = [{"x": x, "y": x.sum(-1)} for x in xs]
    model = MLP()
    state = TrainState.create(
        apply_fn=model.apply, params=model.init(jax.random.key(0), jnp.ones((1, 8))), tx=optax.sgd(0.02)
    )

    @jax.jit
    # jdist: @jdist.distribute(strategy)
    def train_step(state, batch):
        def loss_fn(params):
            return jnp.mean((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        # jdist: loss, grads = jdist.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    losses = []
    for batch in batches:
        # jdist: for batch in strategy.distribute_dataset(batches):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return {"state": state, "losses": losses}
