"""Run by `jdist launch`: cases of the matrix under multi_worker, on every process of a real cluster.

Usage: several_processes.py FOLDER STRATEGY-FAMILY-OPTION-OPTIMIZER ...
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.conformance import metric_steps
from tests.conformance.matrix import MULTI_WORKER

folder, cases = Path(sys.argv[1]), [tuple(case.split("-")) for case in sys.argv[2:]]
strategies = {name: make() for name, make in MULTI_WORKER.items()}  # before anything uses JAX's devices

from tests.conformance.families import FAMILIES  # noqa: E402 # its models touch devices
from tests.conformance.matrix import OPTIMIZERS, OPTIONS, PRECISIONS  # noqa: E402

for strategy, family, option, optimizer in cases:
    run = FAMILIES[family](strategies[strategy], OPTIMIZERS[optimizer](), **{**OPTIONS, **PRECISIONS}[option])
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(run.params)]
    facts = np.array([run.compilations_after_first_call, run.shardings_kept])
    name = f"{strategy}-{family}-{option}-{optimizer}.{jax.process_index()}.npz"
    np.savez(folder / name, *leaves, losses=run.losses, facts=facts)

for strategy in ("shard_map", "jit"):
    metrics = metric_steps.evaluated(strategies[strategy])
    np.savez(folder / f"metrics-{strategy}.{jax.process_index()}.npz", **metrics)
