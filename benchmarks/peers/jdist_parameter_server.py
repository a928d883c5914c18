"""jdist's side of parameter_server.py: arguments PS PARAMETERS [OPTION=VALUE ...]; 0 parameters: closures that do nothing."""

from __future__ import annotations

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from side import serve

import jdist

NUM_PS, PARAMETERS = int(sys.argv[1]), int(sys.argv[2])
LEAVES = 2 if PARAMETERS < 1000 else 10
strategy = jdist.parameter_server(local_workers=2, local_ps=NUM_PS, **dict(pair.split("=") for pair in sys.argv[3:]))


def create_state():
    params = [jnp.ones(PARAMETERS // LEAVES) for _ in range(LEAVES)]
    return jdist.TrainState.create(params=params, tx=optax.sgd(0.01))


@jdist.distribute(strategy)
def train_step(state, batch):
    def loss_fn(params):
        return sum((p * p).sum() / 2 for p in params) * batch["scale"][0]

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def nothing(x):
    return x


state = strategy.init(create_state) if PARAMETERS else None
batch = {"scale": np.full(1, 1e-4, np.float32)}


def run(steps):
    for _ in range(steps):
        _, metrics = train_step(state, batch)
    train_step.wait()
    return float(metrics["loss"])


def run_nothing(calls):
    for _ in range(calls):
        value = strategy.coordinator.schedule(nothing, (batch["scale"],))
    strategy.coordinator.join()
    return float(value.result()[0])


serve(
    {"jdist": jdist.__version__, "jax": jax.__version__, "python": sys.version.split()[0]},
    run if PARAMETERS else run_nothing,
)
strategy.coordinator.close()
