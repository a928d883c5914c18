"""Run by `jdist launch`: what multi_worker's processes are fed, written down by each.

Usage: input_of_processes.py FOLDER [STATE], which is a position to go on at.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jdist
from jdist.data import from_arrays, from_files

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.data import drawing

folder = Path(sys.argv[1])
strategy = jdist.multi_worker()
assert strategy.cluster is not None
index, count = strategy.cluster.process_index, strategy.cluster.num_processes
facts = {}


def shown(batch):
    """The real rows on each of this process's devices."""
    shards = zip(batch["x"].addressable_shards, batch["mask"].addressable_shards, strict=True)
    return [np.asarray(x.data)[np.asarray(mask.data)].tolist() for x, mask in shards]


def arrays(rows, global_batch, **options):
    return from_arrays({"x": np.asarray(rows, np.float32)}, global_batch=global_batch, **options)


def of_resumed():
    saved = json.loads(Path(sys.argv[2]).read_text())
    dataset = strategy.distribute_dataset(arrays(range(40), 8, shuffle_seed=3))
    dataset.restore(saved)
    return [shown(batch) for batch in dataset]


def of_saved():
    dataset = strategy.distribute_dataset(arrays(range(40), 8, shuffle_seed=3))
    iterator = iter(dataset)
    rows = [shown(next(iterator)) for _ in range(2)]
    return rows, dataset.state()


def of_files():
    reads = []

    def read(path):
        reads.append(path)
        return {"x": np.full(int(path), int(path), np.float32)}

    dataset = strategy.distribute_dataset(from_files(["3", "2", "1"], read, global_batch=4))
    return [shown(batch) for batch in dataset], reads


OWN = [list(range(10)), list(range(100, 105))]


def own(**options):
    return strategy.distribute_dataset(arrays(OWN[index], 4), jdist.InputOptions(autoshard="off", **options))


@jdist.distribute(strategy, args=("batch",), returns=("metrics", "examples"))
def mean_and_rows(batch):
    return {"mean": jdist.mean(batch["x"], batch["mask"])}, batch["x"]


def of_own():
    dataset = own()
    told = [repr(dataset), dataset.num_steps, dataset.global_batch, dataset.element_spec["x"].shape, dataset.state()]
    steps = []
    for batch in dataset:
        metrics, rows = mean_and_rows(batch)
        steps.append([float(metrics["mean"]), np.asarray(rows.addressable_data(0)).tolist(), shown(batch)])
    return steps, told


def of_own_options():
    on_host = [shown(batch) for batch in own(prefetch_to_device=False)]
    unhurried = [shown(batch) for batch in own(prefetch=0)]
    options = jdist.InputOptions(autoshard="off")
    stacked = strategy.distribute_dataset(arrays(OWN[index], 4), options, steps_per_call=2)
    return on_host, unhurried, [batch["x"].shape for batch in stacked]


def of_function(replication):
    contexts = []

    def dataset(context):
        contexts.append([context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync])
        source = arrays(range(12), context.per_replica_batch(8))
        return jdist.data.shard(source, context.num_input_pipelines, context.input_pipeline_id)

    options = jdist.InputOptions(replication=replication)
    batches = [shown(batch) for batch in strategy.distribute_datasets_from_function(dataset, options)]
    return contexts, batches


def failure(make):
    try:
        return list(make())
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"


def of_errors():
    def batches():
        yield {"x": np.ones(4, np.float32)}
        if index == 1:
            raise OSError("disk gone")
        yield {"x": np.ones(4, np.float32)}

    def function(context):
        if index == 0:
            raise OSError("no such folder")
        return [np.ones(4)]

    options = jdist.InputOptions(autoshard="off")
    return [
        failure(lambda: [None for _ in strategy.distribute_dataset(batches(), options)]),
        failure(lambda: strategy.distribute_datasets_from_function(function)),
        failure(lambda: strategy.distribute_dataset(arrays(range(8 + index), 4))),
        failure(lambda: strategy.distribute_dataset(arrays(range(8), 4), jdist.InputOptions(autoshard="file"))),
        failure(lambda: strategy.distribute_dataset(list(strategy.distribute_dataset(arrays(range(8), 4))))),
    ]


def of_loops_left_early():
    """What is left at process 0 and here when loops are left while threads are unequally far ahead."""
    for _ in range(5):
        options = jdist.InputOptions(autoshard="off", prefetch=1 + 3 * index)
        dataset = strategy.distribute_dataset(arrays(OWN[index], 2, epochs=None), options)
        for batch in dataset:
            mean_and_rows(batch)
            break
        dataset.close()
    dataset = None
    gc.collect()
    return left_behind()


def left_behind():
    """What exchanges have left in memory, once it is nothing; else after a while."""
    runtime: Any = strategy.cluster
    deadline_s = time.monotonic() + 20
    while True:
        left = [len(runtime.exchanges._answers)]
        if index == 0:
            hub = runtime._server._state
            left += [len(hub.values), len(hub.forgotten)]
        if not any(left) or time.monotonic() > deadline_s:
            return left
        time.sleep(0.02)


if len(sys.argv) > 2:
    facts["resumed"] = of_resumed()
else:
    facts["data"] = [shown(batch) for batch in strategy.distribute_dataset(arrays(range(14), 8))]
    facts["drawing"] = drawing.losses(strategy)
    facts["saved"], facts["state"] = of_saved()
    facts["files"], facts["reads"] = of_files()
    facts["own"], facts["told"] = of_own()
    facts["on_host"], facts["unhurried"], facts["stacked"] = of_own_options()
    facts["per_worker"] = of_function("per_worker")
    facts["per_replica"] = of_function("per_replica")
    facts["errors"] = of_errors()
    facts["left_behind"] = of_loops_left_early()
(folder / f"{count}.{jax.process_index()}.json").write_text(json.dumps(facts))
