"""Run by `jdist launch` as two processes, of which the second is given something else; each writes what it was told."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jdist

strategy = jdist.multi_worker()

import jax  # noqa: E402 # multi_worker comes first
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

process = jax.process_index()
compiled: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
)
traces: list[int] = []
ROWS = {"x": np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)}


def create(seed, rate):
    def make(key):
        tx = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
        return jdist.TrainState.create(params={"w": jax.random.normal(key, (3,))}, tx=tx)

    return strategy.init(make, jax.random.key(seed))


def train_step(state, batch, factor=1.0, rounds=1):
    def loss_fn(params):
        return jdist.mean((batch["x"] @ params["w"] - 1.0) ** 2, batch["mask"])

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    for _ in range(rounds):
        grads = jax.tree.map(lambda g: g * factor, grads)
    return state.apply_gradients(grads=grads), {"loss": loss}


def run(state, step, **options):
    distributed = jdist.distribute(step, strategy, **options)
    (batch,) = strategy.distribute_dataset(jdist.data.from_arrays(ROWS, global_batch=16))
    compiled.clear()
    try:
        distributed(state, batch)
        distributed.wait()
    except jdist.errors.JDistError as exc:
        return [type(exc).__name__, str(exc), len(compiled), list(getattr(exc, "leaves", ()))]
    return ["nothing", "", len(compiled), []]


def counted(state, batch):
    traces.append(process)
    return train_step(state, batch)


def with_options(factor=1.0, rounds=1):
    def step(state, batch):
        return train_step(state, batch, factor, rounds)

    return step


def printing(state, batch):
    if process == 0:
        jax.debug.print("one process may report for all")
    return train_step(state, batch)


table = np.arange(3.0, dtype=np.float32) + process


def with_table(state, batch):
    return train_step(state, batch, jnp.asarray(table))


found = {
    "seed": run(create(process, 0.1), train_step),
    "hyperparameter": run(create(0, [0.1, 0.01][process]), train_step),
    "constant": run(create(0, 0.1), with_options([0.5, 0.25][process]), check_replicas=0),
    "another equation": run(create(0, 0.1), with_options(0.5, [1, 2][process]), check_replicas=0),
    "a closed-over array": run(create(0, 0.1), with_table, check_replicas=0),
    "the same": run(create(0, 0.1), counted),
    "one prints": run(create(0, 0.1), printing),
}
found["traces"] = len(traces)
(Path(sys.argv[1]) / f"{process}.json").write_text(json.dumps(found))
