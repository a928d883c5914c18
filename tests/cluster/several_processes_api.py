"""Run by `jdist launch` as two processes of two devices: each prints what the replica API gives there, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jdist

strategy = jdist.multi_worker()

import jax  # noqa: E402 # multi_worker comes first
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from jdist.errors import NonFiniteError, ReplicaDivergenceError  # noqa: E402

process = jax.process_index()
found: dict = {"repr": repr(strategy), "same again": jdist.multi_worker().cluster is strategy.cluster}
found["num_replicas"] = strategy.num_replicas

ids = strategy.run(lambda: jdist.replica_id())
found["local ids"] = [int(x) for x in strategy.local_results(ids)]
found["sum of ids"] = int(strategy.reduce("sum", ids))
found["gathered"] = strategy.gather(strategy.run(lambda: jnp.full(1, jdist.replica_id())), axis=0).tolist()

made_for: list[int] = []


def value(context: jdist.ValueContext) -> np.ndarray:
    made_for.append(context.replica_id_in_sync_group)
    return np.float32(context.replica_id_in_sync_group * 10)


values = strategy.distribute_values_from_function(value)
found["made for"] = made_for
found["of all"] = [float(x) for x in values.all_results()]
found["doubled here"] = [float(x) for x in strategy.run(lambda x: 2 * x, values).local_results()]
keys = strategy.distribute_values_from_function(lambda c: jax.random.key(c.replica_id_in_sync_group))
drawn = strategy.run(lambda key: jax.random.uniform(key), keys)
found["keys"] = [float(x) for x in drawn.all_results()]

# Arrays that every process has whole: a host array, a device array, and a key in the state.
state = strategy.init(lambda key, x: {"key": key, "x": x * 2}, jax.random.key(3), np.arange(3.0))
fetched = strategy.fetch(state)
found["fetched"] = fetched["x"].tolist()
found["key"] = bool(jax.random.key_data(fetched["key"]).tolist() == jax.random.key_data(jax.random.key(3)).tolist())


@jdist.distribute(strategy)
def step(state, batch):
    loss, grads = jdist.value_and_grad(lambda w: jdist.mean((batch["x"] * w) ** 2, batch["mask"]))(state["w"])
    return {"w": state["w"] - 0.1 * grads}, {"loss": loss}


@jdist.distribute(strategy, args=("state", "batch"), returns=("examples",))
def predict(state, batch):
    return batch["x"] * 10


source = jdist.data.from_arrays({"x": np.arange(14, dtype=np.float32)}, global_batch=8)
state = {"w": jnp.ones(())}  # adopted: an ordinary array, the same on all processes
losses, predictions, rows = [], [], []
for batch in strategy.distribute_dataset(source):
    shards = zip(batch["x"].addressable_shards, batch["mask"].addressable_shards, strict=True)
    rows.append([float(x) for a, b in shards for x, real in zip(a.data, b.data, strict=True) if real])
    predictions.append(np.asarray(predict(state, batch)).tolist())
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
found |= {"rows": rows, "predictions": predictions, "losses": losses, "w": float(strategy.fetch(state)["w"])}

whole = {"x": np.arange(8, dtype=np.float32), "mask": np.ones(8, bool)}  # a batch by hand is the whole one
found["by hand"] = np.asarray(predict(state, whole)).tolist()


@jdist.distribute(strategy, check_replicas=1)
def diverge(state, batch):
    return {"w": state["w"] + jdist.replica_id()}, {}


try:
    diverge({"w": jnp.zeros(())}, whole)
except ReplicaDivergenceError as exc:
    found["diverged"] = [list(replicas) for replicas in exc.replicas]

try:
    bad = whole | {"x": np.where(np.arange(8) == 7, np.nan, 1).astype(np.float32)}  # on the last replica alone
    for _ in range(10):
        state, _ = step(state, bad)
    step.wait()
except NonFiniteError as exc:
    found["not finite at"] = exc.step

Path(sys.argv[1], f"{process}.json").write_text(json.dumps(found))
