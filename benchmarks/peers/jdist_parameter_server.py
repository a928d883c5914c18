"""jdist's side of parameter_server.py and parameter_server_costs.py: arguments PS PARAMETERS [OPTION=VALUE ...].

0 parameters: closures that do nothing. Options are those of `jdist.parameter_server`; and tls=1: the servers are a cluster with
mutual TLS, instead of processes that the strategy starts.
"""

from __future__ import annotations

import contextlib
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


def main(strategy: jdist.Strategy) -> None:
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
    batch = {"scale": np.full(2, 1e-4, np.float32)}  # a row for each worker, which mode="sync" needs

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


with contextlib.ExitStack() as ends:
    pairs = (argument.split("=") for argument in sys.argv[3:])
    options = {name: int(value) if value.isdigit() else value for name, value in pairs}
    if options.pop("tls", 0):
        from tls_cluster import tls_cluster  # of this tree's jdist: two_trees.py runs others' here

        ends.enter_context(tls_cluster(workers=2, ps=NUM_PS))
    else:
        options |= {"local_workers": 2, "local_ps": NUM_PS}
    strategy = jdist.parameter_server(**options)
    ends.callback(strategy.coordinator.close)
    main(strategy)
