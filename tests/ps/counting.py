"""A step that counts itself, and adds up a number of its batch: what took effect twice, or not at all, is seen."""

import numpy as np

import jdist

ROWS = 4  # of the leaf that is cut over the servers


def step(state, batch):
    total, gradient = jdist.value_and_grad(lambda w: jdist.mean(batch["x"] * w.sum(), batch["mask"]))(state["w"])
    return {"n": state["n"] + 1, "w": state["w"] - gradient}, {"total": total}


def create():
    return {"n": np.int32(0), "w": np.zeros(ROWS, np.float32)}


def batch(number, rows=2):
    """The batch of the call of a number."""
    return {"x": np.full(rows, number % 10 + 1, np.float32), "mask": np.ones(rows, bool)}


def on_shards(state):
    """For each shard its counter, and the distinct values of its rows."""
    job = state.job
    found = []
    for shard, arrays in zip(job._layout.shards, job.coordinator.state().kept, strict=True):
        values = dict(zip((rows.of for rows in shard.rows), arrays, strict=True))
        found.append((int(values[0]), set(np.asarray(values[1]).tolist())))
    return found


def check(state, numbers, shards=2):
    """That each of these calls took effect on every shard, once."""
    numbers = list(numbers)
    found = on_shards(state)
    assert found == [(len(numbers), {-float(sum(n % 10 + 1 for n in numbers))})] * shards, found
