"""Run by `jdist launch`: checkpoints of two processes, and what each of them met.

Usage: save_in_processes.py FOLDER; process I writes FOLDER/process_I.json.
"""

import json
import sys
from pathlib import Path

import jdist

strategy = jdist.multi_worker()

import jax  # noqa: E402 # not before the processes have joined
import numpy as np  # noqa: E402

from jdist.checkpoint import folder as shared_folder  # noqa: E402
from jdist.checkpoint import together  # noqa: E402
from jdist.errors import JDistError  # noqa: E402
from jdist.support.arrays import put  # noqa: E402
from jdist.train import Checkpointer  # noqa: E402

folder, process = Path(sys.argv[1]), jax.process_index()


def state_at(step: int):
    spread = put(np.arange(24.0, dtype=np.float32).reshape(8, 3) + step, strategy.batch_sharding)
    whole = {"w": np.full(5, step, np.float32), "rng": jax.random.key(step), "n": np.int32(step)}
    return {"spread": spread, **jax.tree.map(lambda x: put(x, strategy.replicated_sharding), whole), "python": step}


def said(work) -> str:
    try:
        work()
    except JDistError as exc:
        return f"{type(exc).__name__}: {exc}"
    return "nothing"


met = {}
with Checkpointer(folder / "run", keep=9, check=strategy.check, cluster=strategy.cluster) as checkpoints:
    checkpoints.save(1, state_at(1), data={"position": 1})
    checkpoints.save(2, state_at(2), data={"position": 2})
    restored = checkpoints.restore(state_at(0))
    for new, old in zip(jax.tree.leaves(restored.state), jax.tree.leaves(state_at(2)), strict=True):
        if isinstance(new, jax.Array):
            assert new.sharding == old.sharding
            new, old = [jax.random.key_data(x) if x.dtype == jax.random.key(0).dtype else x for x in (new, old)]
            for a, b in zip(new.addressable_shards, old.addressable_shards, strict=True):
                np.testing.assert_array_equal(a.data, b.data)
        else:
            assert new == old
    met["restored"] = restored.data

    write = together.write_pieces

    def full(*_):
        raise OSError(28, "No space left on device")

    if process == 1:
        together.write_pieces = full
    met["full disk"] = said(lambda: checkpoints.save(3, state_at(3), wait=True))
    together.write_pieces = write
    checkpoints.save(4, state_at(4), wait=True)
    met["steps"] = checkpoints.steps()

with Checkpointer(folder / f"alone_{process}") as alone:
    met["without the others"] = said(lambda: alone.save(1, state_at(1)))
shared_folder._SEEN_S = 0.2
met["not shared"] = said(lambda: Checkpointer(folder / f"own_{process}", cluster=strategy.cluster).claim())
(folder / f"process_{process}.json").write_text(json.dumps(met))
