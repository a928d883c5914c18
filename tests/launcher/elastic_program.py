"""A job that goes on without lost processes; its state counts how often each row was seen. Arguments: folder, epochs."""

import json
import os
import pathlib
import sys
import time

import jax.numpy as jnp
import numpy as np

import jdist

ROWS, BATCH = 48, 12
folder, epochs = pathlib.Path(sys.argv[1]), int(sys.argv[2])
strategy = jdist.multi_worker(on_loss="continue", communication={"timeout_s": 10, "start_timeout_s": 120})


def step(state, batch):
    seen = jnp.zeros(ROWS, jnp.int32).at[batch["id"]].add((batch["mask"] > 0).astype(jnp.int32))
    return state + jdist.all_reduce(seen, "sum"), {"loss": jdist.mean(batch["id"] * 1.0, batch["mask"])}


def put(name, value):
    new = folder / f"{name}.new"
    new.write_text(json.dumps(value))
    new.rename(folder / name)


def pace(metrics):
    """Notes where this process is; steps are slow until the test says that the job may end."""
    cluster = strategy.cluster
    put(f"{os.getpid()}.at", [cluster.generation, cluster.num_processes, metrics.step])
    if not (folder / "end").exists():
        time.sleep(0.2)


state = strategy.init(lambda: jnp.zeros(ROWS, jnp.int32))
state, _ = jdist.fit(
    step,
    state,
    {"id": np.arange(ROWS)},
    strategy=strategy,
    global_batch=BATCH,
    shuffle_seed=1,
    epochs=epochs,
    callbacks=[pace],
    progress=False,
    log_to=None,
    verify="off",
)
put(f"{os.getpid()}.seen", strategy.fetch(state).tolist())
