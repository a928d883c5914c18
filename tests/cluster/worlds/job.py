"""A training with a ledger of its rows in the state: `job.py FOLDER EPOCHS`; a file FOLDER/pause_at holds it at a step."""

import json
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jdist

ROWS, BATCH = 480, 48
folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
strategy = jdist.multi_worker(on_loss="continue", communication={"timeout_s": 5.0, "start_timeout_s": 120.0})


def step(state, batch):
    def loss(w):
        return jdist.mean((jnp.tanh(batch["x"] @ w["a"]) @ w["b"] - batch["y"]) ** 2, batch["mask"])

    value, grads = jdist.value_and_grad(loss)(state["w"])
    seen = jnp.zeros(ROWS, jnp.int32).at[batch["row"]].add(batch["mask"].astype(jnp.int32))
    w = jax.tree.map(lambda p, g: p - 0.05 * g, state["w"], grads)
    return {"w": w, "seen": state["seen"] + jdist.all_reduce(seen, "sum")}, {"loss": value}


def create(key):
    a, b = jax.random.split(key)
    w = {"a": jax.random.normal(a, (8, 16)), "b": jax.random.normal(b, (16,))}
    return {"w": w, "seen": jnp.zeros(ROWS, jnp.int32)}


def pace(moment):
    where = {"step": moment.step, "rank": strategy.cluster.process_index, "of": strategy.cluster.num_processes}
    path = folder / f"{os.getpid()}.at"
    path.with_suffix(".tmp").write_text(json.dumps(where | {"generation": strategy.cluster.generation}))
    path.with_suffix(".tmp").rename(path)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and moment.step >= int((folder / "pause_at").read_text()):
        if strategy.cluster.stopping is not None:  # somebody comes or leaves
            break
        time.sleep(0.01)


draw = np.random.default_rng(0)
data = {
    "x": draw.normal(size=(ROWS, 8)).astype(np.float32),
    "y": draw.normal(size=ROWS).astype(np.float32),
    "row": np.arange(ROWS),
}
state, history = jdist.fit(
    step,
    strategy.init(create, jax.random.key(0)),
    data,
    strategy=strategy,
    global_batch=BATCH,
    shuffle_seed=1,
    epochs=epochs,
    callbacks=[
        pace,
        jdist.callbacks.checkpoint(folder / "run", every=10),
        jdist.callbacks.ema(0.9, params=lambda state: state["w"]),
    ],
    progress=False,
    log_to=folder / "rows",
    log_every=5,
    verify="off",
)
if history.stopped is None:
    fetched = jax.tree.map(np.asarray, strategy.fetch(state))
    found = {"seen": fetched["seen"].tolist(), "w": [x.tolist() for x in jax.tree.leaves(fetched["w"])]}
    found["losses"] = [epoch["loss"] for epoch in history.epochs]
    found["rows"] = [row["step"] for row in history.rows]
    (folder / f"{os.getpid()}.json").write_text(json.dumps(found))
