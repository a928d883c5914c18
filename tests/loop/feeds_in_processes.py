"""`jdist.fit` on another library's data, in every process of a job: `feeds_in_processes.py FOLDER KIND PROCESSES [STEP]`.

Killed after STEP steps, in the middle of an epoch; without STEP it goes on, and is compared with a run that nothing happens to.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jdist

sys.path.insert(0, str(Path(__file__).parents[2]))
folder, kind, processes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
killed_after = int(sys.argv[4]) if len(sys.argv) > 4 else None
ROWS = 44  # 6 batches of 8 in an epoch, the last of them short


def row(number: Any) -> dict[str, Any]:
    return {"x": np.cos(np.arange(4, dtype=np.float32) * (1 + number)).astype(np.float32)}


class Source:
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> dict[str, Any]:
        return row(number)

    def __repr__(self) -> str:
        return f"Source({ROWS})"


def data(process: int) -> Any:
    """The data of a kind, as a user writes it; of `_part` this process's part."""
    batch = 8 // processes
    if kind.startswith("grain"):
        import grain

        elements = grain.MapDataset.source(Source()).shuffle(seed=5)
        if kind == "grain_map":
            return elements.batch(8)
        if kind == "grain_iter":
            return elements.repeat(3).to_iter_dataset().filter(lambda row: row["x"][1] > -0.9).batch(8)
        if kind == "grain_part":
            options = grain.sharding.ShardOptions(shard_index=process, shard_count=processes)
            sampler = grain.samplers.IndexSampler(ROWS, num_epochs=3, shuffle=True, seed=5, shard_options=options)
            return grain.DataLoader(
                data_source=Source(),
                sampler=sampler,
                operations=[grain.transforms.Batch(batch)],
                shard_options=options,
            )
    if kind == "files":  # of which two processes share the files
        sizes = {"0": 8, "8": 8, "16": 7, "23": 7, "30": 7, "37": 7}

        def read(path: str) -> dict[str, Any]:
            return {"x": np.stack([row(int(path) + i)["x"] for i in range(sizes[path])])}

        return jdist.data.from_files(sizes, read, global_batch=8, shuffle_seed=5, shuffle_window=2, workers=2)
    if kind == "huggingface":
        import datasets

        table = datasets.Dataset.from_dict({"x": [row(i)["x"] for i in range(ROWS)]})
        return jdist.data.from_rows(table, global_batch=8, shuffle_seed=5)
    if kind == "torch":
        import torch
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(Source(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(5))
    raise ValueError(kind)


def train_step(state: Any, batch: Any) -> Any:
    def loss(w: Any) -> Any:
        return jdist.mean((batch["x"] @ w - 1.0) ** 2, batch["mask"])

    value, grads = jdist.value_and_grad(loss)(state)
    return state - 0.3 * grads, {"loss": value}


def main() -> None:
    strategy = jdist.multi_worker() if processes > 1 else jdist.mirrored()
    assert strategy.cluster.num_processes == processes

    def fit(where: Path, *, kill: int | None = None) -> Any:
        def end(moment: Any) -> None:
            if moment.step == kill:
                os.kill(os.getpid(), signal.SIGKILL)

        state, history = jdist.fit(
            train_step,
            strategy.init(lambda: np.arange(4, dtype=np.float32)),
            data(strategy.cluster.process_index),
            strategy=strategy,
            **({"epochs": 3} if kind in ("files", "grain_map", "huggingface", "torch") else {}),
            progress=False,
            log_to=None,
            log_every=1,
            callbacks=[jdist.callbacks.checkpoint(where, every=2), end],
        )
        return np.asarray(strategy.fetch(state)).tobytes().hex(), [row["loss"] for row in history.rows if "loss" in row]

    if killed_after is not None:
        fit(folder / "killed", kill=killed_after)
        raise AssertionError("it was not killed")
    resumed, whole = fit(folder / "killed"), fit(folder / "whole")
    found = {"same": resumed == whole, "steps": len(whole[1]), "replicas": strategy.num_replicas, "end": resumed[0]}
    print("found", json.dumps(found), flush=True)


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)
    main()
