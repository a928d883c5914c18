"""Run by `jdist launch` as two processes of two devices: what each reads and holds of checkpoints of a state in parts.

Usage: restore_in_processes.py FOLDER; process I writes FOLDER/I.json.
"""

import json
import sys
import tracemalloc
import warnings
from pathlib import Path

import numpy as np

import jdist


def create():
    """Makes arrays that are cut along each axis, padded, or kept as one row of elements."""
    shapes = {"rows": (1024, 300), "columns": (301, 1024), "stack": (4, 256, 300), "odd": (7, 5, 9001), "few": (10,)}
    rng = np.random.default_rng(0)
    return {f"{name} {i}": rng.normal(size=of).astype(np.float32) for name, of in shapes.items() for i in range(4)}


def main(folder: Path) -> None:
    strategy = jdist.multi_worker(shard={"of": "state", "whole_below": 64})
    cluster = strategy.cluster

    import jax  # not before the processes have joined

    from jdist.checkpoint import pieces
    from jdist.train import Checkpointer

    def put(x):
        return strategy.init(lambda: x)

    def same(state, within=strategy) -> bool:
        return all(map(np.array_equal, jax.tree.leaves(within.fetch(state)), jax.tree.leaves(create())))

    files, sizes, read_file = set(), [], pieces._read_file

    def counting(file, group):
        group = list(group)
        files.add(file.name)
        sizes.extend(box.nbytes for _, _, box in group)
        read_file(file, iter(group))

    met = {}
    state = put(create())
    like = put(jax.tree.map(np.zeros_like, create()))
    with Checkpointer(folder / "run", cluster=cluster) as checkpoints:
        checkpoints.save(1, state, wait=True)
        tracemalloc.start()
        checkpoints.save(2, state, wait=True)
        met["peak of a save"] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

        pieces._read_file = counting
        tracemalloc.start()
        restored = checkpoints.restore(like)
        met["peak"] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        met |= {"files": sorted(files), "bytes": sum(sizes), "same": same(restored.state)}

        sizes.clear()
        part = checkpoints.restore(like, only="columns .*")
        pieces._read_file = read_file
        got, want = strategy.fetch(part.state), create()
        met["bytes of a part"] = sum(sizes)
        met["part is right"] = all(
            np.array_equal(x, want[name]) if name.startswith("columns") else not np.any(x) for name, x in got.items()
        )
        met["not restored"] = part.not_restored

        groups = jdist.multi_worker(shard={"of": "state", "within": 2, "whole_below": 64})
        into = groups.init(lambda: jax.tree.map(np.zeros_like, create()))
        met["same within 2"] = same(checkpoints.restore(into).state, groups)

        try:
            checkpoints.restore(like, step=1 + jax.process_index())
        except jdist.errors.CheckpointError as error:
            met["different steps"] = str(error)

        if jax.process_index() == 0:
            (damaged,) = (folder / "run").glob("step_00000002*/pieces_1.bin")
            damaged.write_bytes(damaged.read_bytes()[:-4] + b"\1\2\3\4")
        cluster.exchange("damaged", None, 60.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            restored = checkpoints.restore(like)
        (met["warning"],) = [str(each.message) for each in caught if "checksum" in str(each.message)]
        met["fell back to"] = restored.step if same(restored.state) else None
        met["old state is whole"] = all(not np.any(x) for x in jax.tree.leaves(strategy.fetch(like)))
    (folder / f"{jax.process_index()}.json").write_text(json.dumps(met))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
