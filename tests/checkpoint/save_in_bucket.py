"""Run by `jdist launch`: two processes save steps 1 to 5 into a bucket, and go on from what is there.

Usage: save_in_bucket.py URL FOLDER; process I writes FOLDER/process_I.json.
"""

import json
import sys
from pathlib import Path

import jdist

strategy = jdist.multi_worker()

import jax  # noqa: E402 # not before the processes have joined
import numpy as np  # noqa: E402

from jdist.support.arrays import put  # noqa: E402
from jdist.train import Checkpointer  # noqa: E402

url, folder, process = sys.argv[1], Path(sys.argv[2]), jax.process_index()
if url.startswith("folderstore://"):
    import tests.checkpoint.stores  # noqa: F401 - tells fsspec of it


def state_at(step: int):
    spread = put(np.arange(24.0, dtype=np.float32).reshape(8, 3) + step, strategy.batch_sharding)
    return {"spread": spread, "w": put(np.full(5, step, np.float32), strategy.replicated_sharding)}


with Checkpointer(url, keep=2, cluster=strategy.cluster) as checkpoints:
    restored = checkpoints.restore(state_at(0))
    begun_at = 0 if restored is None else restored.step
    if restored is not None:
        for new, old in zip(jax.tree.leaves(restored.state), jax.tree.leaves(state_at(begun_at)), strict=True):
            for a, b in zip(new.addressable_shards, old.addressable_shards, strict=True):
                np.testing.assert_array_equal(a.data, b.data)
    for step in range(begun_at + 1, 6):
        checkpoints.save(step, state_at(step), wait=True)
    steps = checkpoints.steps()
(folder / f"process_{process}.json").write_text(json.dumps({"begun_at": begun_at, "steps": steps}))
