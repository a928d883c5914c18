"""jdist's side of `mirrored.py`: argument 1 is the number of devices."""

import os
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={sys.argv[1]}"}

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from side import serve

import jdist

strategy = jdist.mirrored()
model = nn.Sequential([nn.Dense(512), nn.relu, nn.Dense(512), nn.relu, nn.Dense(10)])


def create_state(key):
    params = model.init(key, jnp.zeros((1, 784)))["params"]
    return jdist.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.05, momentum=0.9))


@jdist.distribute(strategy)
def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


rng = np.random.default_rng(0)
arrays = {"x": rng.normal(size=(1024, 784)).astype(np.float32), "y": rng.integers(0, 10, 1024)}
batch = next(iter(strategy.distribute_dataset([arrays])))
state = strategy.init(create_state, jax.random.key(0))


def run(steps):
    global state
    for _ in range(steps):
        state, metrics = train_step(state, batch)
    return float(metrics["loss"])


serve({"jax": jax.__version__, "python": sys.version.split()[0]}, run)
