"""`jdist.fit` on another library's data, in every process of a job: `feeds_in_processes.py FOLDER KIND PROCESSES [STEP]`.

Killed after STEP steps, in the middle of an epoch; without STEP it goes on, and is compared with a run that nothing happens to.
The state holds the rows of every step beside the parameters.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jdist

sys.path.insert(0, str(Path(__file__).parents[2]))
folder, kind, processes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
killed_after = int(sys.argv[4]) if len(sys.argv) > 4 else None
ROWS = 44  # 6 batches of 8 in an epoch, the last of them short
STEPS = 24  # at most


def row(number: Any) -> dict[str, Any]:
    return {"x": np.cos(np.arange(4, dtype=np.float32) * (1 + number)).astype(np.float32), "y": np.int32(number)}


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
        if kind == "grain_workers":
            options = grain.MultiprocessingOptions(num_workers=2)
            return elements.repeat(3).batch(8).to_iter_dataset().mp_prefetch(options)
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
            rows = [row(int(path) + i) for i in range(sizes[path])]
            return {name: np.stack([each[name] for each in rows]) for name in ("x", "y")}

        return jdist.data.from_files(sizes, read, global_batch=8, shuffle_seed=5, shuffle_window=2, workers=2)
    if kind == "huggingface":
        import datasets

        table = datasets.Dataset.from_list([row(i) for i in range(ROWS)]).with_format("numpy", dtype=np.float32)
        return jdist.data.from_rows(table, global_batch=8, shuffle_seed=5)
    if kind.startswith("torch"):
        import torch
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        if kind == "torch_part":
            sampler = StatefulDistributedSampler(Source(), num_replicas=processes, rank=process, seed=5)
            return StatefulDataLoader(Source(), batch_size=batch, sampler=sampler)
        workers = {"num_workers": 2, "multiprocessing_context": "forkserver"} if kind == "torch_workers" else {}
        order = {"shuffle": True, "generator": torch.Generator().manual_seed(5)}
        return StatefulDataLoader(Source(), batch_size=8, **order, **workers)
    raise ValueError(kind)


def train_step(state: Any, batch: Any) -> Any:
    def loss(w: Any) -> Any:
        return jdist.mean((batch["x"] @ w - 1.0) ** 2, batch["mask"])

    value, grads = jdist.value_and_grad(loss)(state["w"])
    rows = jdist.all_gather(jnp.where(batch["mask"], batch["y"].astype(jnp.int32), -1))
    trained_on = state["rows"].at[state["step"]].set(rows)
    return {"w": state["w"] - 0.3 * grads, "step": state["step"] + 1, "rows": trained_on}, {"loss": value}


def begin() -> dict[str, Any]:
    return {"w": np.arange(4, dtype=np.float32), "step": np.int32(0), "rows": np.full((STEPS, 8), -1, np.int32)}


def main() -> None:
    strategy = jdist.multi_worker() if processes > 1 else jdist.mirrored()
    assert strategy.cluster.num_processes == processes

    def fit(where: Path, *, kill: int | None = None) -> Any:
        def end(moment: Any) -> None:
            if moment.step == kill:
                os.kill(os.getpid(), signal.SIGKILL)

        state, history = jdist.fit(
            train_step,
            strategy.init(begin),
            data(strategy.cluster.process_index),
            strategy=strategy,
            # Of the others the data themselves have three epochs.
            **({} if kind in ("grain_iter", "grain_part", "grain_workers") else {"epochs": 3}),
            progress=False,
            log_to=None,
            log_every=1,
            callbacks=[jdist.callbacks.checkpoint(where, every=2), end],
        )
        end = {name: np.asarray(leaf) for name, leaf in strategy.fetch(state).items()}
        losses = [row["loss"] for row in history.rows if "loss" in row]
        return end["w"].tobytes().hex(), losses, end["rows"][: end["step"]].tolist()

    if killed_after is not None:
        fit(folder / "killed", kill=killed_after)
        raise AssertionError("it was not killed")
    resumed, whole = fit(folder / "killed"), fit(folder / "whole")
    found = dict(zip(("parameters", "losses", "rows"), zip(resumed, whole, strict=True), strict=True))
    print("found", json.dumps({**found, "replicas": strategy.num_replicas}), flush=True)


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)
    main()
