"""The script that every engine runs: trains on two processes, and writes each step's loss, to the bit, into a folder."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import jdist

strategy = jdist.multi_worker()
folder = Path(sys.argv[1])
rng = np.random.default_rng(0)
x = rng.normal(size=(64, 5)).astype(np.float32)
data = {"x": x, "y": (x @ rng.normal(size=5)).astype(np.float32)}


def train_step(state: Any, batch: Any) -> Any:
    def loss_fn(w: Any) -> Any:
        return jdist.mean((jnp.tanh(batch["x"] @ w) - batch["y"]) ** 2, batch["mask"])

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def kill(moment: Any) -> None:
    """Kills this process, or the actor that it runs in: the parent of its guard."""
    if moment.step != 6 or strategy.cluster.process_index != 1 or os.environ.get("JDIST_LAUNCH_ATTEMPT") != "0":
        return
    victim = sys.argv[2] if len(sys.argv) > 2 else ""
    if victim == "actor":
        guard = os.getppid()
        os.kill(int(Path(f"/proc/{guard}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        signal.pause()  # until the guard ends it
    elif victim == "process":
        os.kill(os.getpid(), signal.SIGKILL)


_, history = jdist.fit(
    train_step,
    strategy.init(lambda: jdist.TrainState.create(params=jnp.zeros(5), tx=optax.adam(0.1))),
    data,
    strategy=strategy,
    steps=10,
    global_batch=16,
    shuffle_seed=3,
    log_every=1,
    callbacks=[jdist.callbacks.checkpoint(folder / "saved", every=4), jdist.callbacks.Callback(on_save=kill)],
    progress=False,
    log_to=None,
    verify="off",
)
if strategy.cluster.is_chief:
    losses = [f"{row['step']} {float(row['loss']).hex()}" for row in history.rows if "loss" in row]
    (folder / "losses").write_text("\n".join([f"{strategy.cluster.num_processes} processes", *losses]))
