"""A chief's program: fits a line under a parameter server, and ends as its argument says."""

import sys

import jax.numpy as jnp
import numpy as np
import optax

import jdist
from jdist.strategies.parameter_server import parameter_server

strategy = parameter_server(
    start_timeout_s=60, max_staleness=4
)  # a worker that starts late pushes nothing from the beginning
x = np.linspace(-1, 1, 64, dtype=np.float32)
dataset = strategy.distribute_dataset(jdist.data.from_arrays({"x": x, "y": 3 * x + 1}, global_batch=16, epochs=40))


@jdist.distribute(strategy)
def train_step(state, batch):
    def loss_fn(params):
        return jdist.mean((params["w"] * batch["x"] + params["b"] - batch["y"]) ** 2, batch["mask"])

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


params = {"w": jnp.float32(0), "b": jnp.float32(0)}
state = strategy.init(lambda: jdist.TrainState.create(params=params, tx=optax.sgd(0.1)))
for batch in dataset:
    state, metrics = train_step(state, batch)
found = strategy.fetch(state)
print(f"w {found.params['w']:.1f}, b {found.params['b']:.1f} after {found.step} steps", flush=True)
if "fail" in sys.argv:
    raise RuntimeError("as asked")
