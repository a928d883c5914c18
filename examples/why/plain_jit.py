"""Data-parallel training by jax.jit and NamedSharding."""

from functools import partial

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from problem import EPOCHS, ROWS, create_params, cross_entropy, image, label, model, tx

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())


@partial(jax.jit, donate_argnums=0)
def train_step(state, batch):
    params, opt_state, total, count = state

    def loss_fn(params):
        losses = cross_entropy(model.apply({"params": params}, batch["image"]), batch["label"])
        summed = (losses * batch["mask"]).sum()
        return summed / batch["mask"].sum(), summed

    (_, summed), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, total + summed, count + batch["mask"].sum()


def batches():
    for begin in range(0, len(label), ROWS):
        batch = {"image": image[begin : begin + ROWS], "label": label[begin : begin + ROWS]}
        real = len(batch["label"])
        batch = {k: np.pad(x, [(0, ROWS - real)] + [(0, 0)] * (x.ndim - 1)) for k, x in batch.items()}
        yield jax.device_put({**batch, "mask": (np.arange(ROWS) < real).astype(np.float32)}, rows)


params = jax.jit(create_params, out_shardings=whole)(jax.random.key(0))
opt_state = jax.jit(tx.init, out_shardings=whole)(params)
for epoch in range(EPOCHS):
    state = (params, opt_state, 0.0, 0.0)
    for batch in batches():
        state = train_step(state, batch)
    params, opt_state, total, count = state
    print(f"epoch {epoch}: loss {total / count:.5f}")
