"""Run by `jdist launch` as two processes of two devices: what each reads of FOLDER/model.safetensors, and what it saves again.

Usage: load_in_processes.py FOLDER; process I writes FOLDER/I.json.
"""

import errno
import json
import sys
import tracemalloc
from pathlib import Path

import numpy as np

import jdist

RULES = [
    ("rows {i}.weight", "rows {i}/kernel", "out in -> in out"),
    ("columns {i}.weight", "columns {i}/kernel", "out in -> in out"),
    ("fused.{layer}", "fused/{part}", "(part out) in -> layer in out"),
    ("odd {i}", "odd {i}"),
    ("few", "few"),
]
PARTS = {"0": 0, "1": 1, "2": 2}


def tensors():
    """Tensors of which the leaves are transposed, stacked, or three of one."""
    rng = np.random.default_rng(0)

    def make(*shape):
        return rng.normal(size=shape).astype(np.float32)

    made = {f"rows {i}.weight": make(300, 1024) for i in range(4)}
    made |= {f"columns {i}.weight": make(1024, 301) for i in range(4)}
    made |= {f"odd {i}": make(7, 5, 9001) for i in range(2)}
    return made | {f"fused.{i}": make(3 * 64, 100) for i in range(2)} | {"few": make(10)}


def shapes():
    import jax

    def shape(*of):
        return jax.ShapeDtypeStruct(of, np.float32)

    made = {f"rows {i}": {"kernel": shape(1024, 300)} for i in range(4)}
    made |= {f"columns {i}": {"kernel": shape(301, 1024)} for i in range(4)}
    made |= {f"odd {i}": shape(7, 5, 9001) for i in range(2)}
    return made | {"fused": {part: shape(2, 100, 64) for part in PARTS}, "few": shape(10)}


def held(leaf):
    """How many elements of an array this process's devices hold, without padding and copies."""
    if not hasattr(leaf, "stored"):
        return leaf.size
    mask = np.zeros(leaf.stored.shape, bool)
    for shard in leaf.stored.addressable_shards:
        mask[shard.index] = True
    if leaf.stored.ndim == len(leaf.shape):
        return int(mask[tuple(map(slice, leaf.shape))].sum())
    return int(mask.reshape(-1)[: leaf.size].sum())


def main(folder: Path) -> None:
    strategy = jdist.multi_worker(shard={"of": "state", "whole_below": 64})
    cluster = strategy.cluster

    import jax  # not before the processes have joined

    from jdist.core.sharded_leaf import is_sharded_leaf
    from jdist.weights import files, save

    readers = []
    init = files.Reader.__init__
    files.Reader.__init__ = lambda self, *args: (readers.append(self), init(self, *args))[1]

    def load(into):
        return jdist.weights.load(folder, into.shapes(shapes()), RULES, cluster=cluster)

    tracemalloc.start()
    loaded = load(strategy)
    met = {"peak": tracemalloc.get_traced_memory()[1], "bytes read": readers[0].bytes_read}
    tracemalloc.stop()
    met["bytes held"] = 4 * sum(map(held, jax.tree.leaves(loaded, is_leaf=is_sharded_leaf)))

    jdist.weights.save(loaded, folder / "again", RULES, cluster=cluster)
    groups = jdist.multi_worker(shard={"of": "state", "within": 2, "whole_below": 64})
    same = jax.tree.map(np.array_equal, strategy.fetch(loaded), groups.fetch(load(groups)))
    met["same"] = all(jax.tree.leaves(same))

    read = files.Reader.read

    def fails(self, tensor, box):
        if tensor.name == "rows 1.weight" and jax.process_index() == 1:
            raise jdist.errors.CheckpointError(f"{tensor}: cannot be read: the disk is gone")
        return read(self, tensor, box)

    files.Reader.read = fails
    try:
        load(strategy)
    except jdist.errors.JDistError as error:
        met["error"] = f"{type(error).__name__}: {error}"

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    sys.modules[save.__module__].check_room = full
    try:
        jdist.weights.save(loaded, folder / "full", RULES, cluster=cluster)
    except jdist.errors.JDistError as error:
        met["full disk"] = f"{type(error).__name__}: {error}"
    (folder / f"{jax.process_index()}.json").write_text(json.dumps(met))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
