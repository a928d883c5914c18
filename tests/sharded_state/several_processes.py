"""Run by `jdist launch` as two processes of two devices: each trains a state in parts, saves it, and prints what it found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jdist

strategy = jdist.multi_worker(shard={"of": "state", "whole_below": 0, "most_whole": 1})

import jax  # noqa: E402 # multi_worker comes first
import numpy as np  # noqa: E402

from jdist.checkpoint.checkpointer import Checkpointer  # noqa: E402
from jdist.errors import DeviceError  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2]))
from jdist.support import xla  # noqa: E402
from tests.sharded_state import toy  # noqa: E402

folder = Path(sys.argv[1])
state, losses = toy.trained(strategy)
whole = strategy.fetch(state)
found = {"losses": losses, "params": [np.asarray(x).tolist() for x in jax.tree.leaves(whole.params)]}
with Checkpointer(folder / "checkpoints", cluster=strategy.cluster) as checkpointer:
    checkpointer.save(1, state)
    checkpointer.wait()
    restored = checkpointer.restore(strategy.init(toy.create)).state
again = strategy.fetch(restored)
found["restored"] = all(
    np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (again.opt_state, whole.opt_state)), strict=True)
)
norms = strategy.run(lambda params: jax.tree.map(lambda x: (x**2).sum(), params), state.params)
found["run"] = [[float(x) for x in jax.tree.leaves(each)] for each in strategy.local_results(norms)]
pairs = jdist.multi_worker(shard={"of": "state", "within": 2})
explained = jdist.explain(jdist.distribute(toy.step, strategy), state, {"x": toy.DATA["x"], "mask": np.ones(40, bool)})
found["kinds"] = sorted({each.kind for each in explained.collectives})
found["taken for wrong"] = xla.gloo_scatters_wrongly()
found["wrong of large parts"] = toy.num_wrong_of_large_parts(pairs)
try:
    np.asarray(state.params["odd"])
except DeviceError as error:
    found["read alone"] = str(error)
mesh, rules = {"replica": -1, "model": 2}, [("up", (None, "model")), ("layers", (None, "model"))]
of_two = jdist.multi_worker(shard={"mesh": mesh, "rules": rules, "whole_below": 0, "most_whole": 1})
state, losses = toy.trained(of_two)
with Checkpointer(folder / "of_two", cluster=of_two.cluster) as checkpointer:
    checkpointer.save(1, state)
    checkpointer.wait()
    restored = checkpointer.restore(strategy.init(toy.create)).state
again, whole = strategy.fetch(restored), of_two.fetch(state)
found["of two"] = {
    "losses": losses,
    "params": [np.asarray(x).tolist() for x in jax.tree.leaves(whole.params)],
    "restored": all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (again, whole)), strict=True)),
    "description": str(of_two),
}
(folder / f"{jax.process_index()}.json").write_text(json.dumps(found))
