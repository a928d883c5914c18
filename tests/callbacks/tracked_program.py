"""A program that the tests start: trains with trackers, and kills itself at the step that it is told, if any.

tracked_program.py FOLDER STEP TRACKER...
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import jdist
from jdist import callbacks
from jdist.callbacks import Started

CONFIG = {"train": {"steps": 12, "learning_rate": 0.5}, "name": "cloud"}
CONFUSION = jdist.metrics.confusion_matrix(2)


class Lines:
    """A tracker as a user would write it: lines of a file, which a kill does not cut."""

    def __init__(self, path: Path):
        self._path = path

    def _write(self, *line: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def start(self, run_id: str, config: Mapping[str, Any], *, resumed: bool) -> Started:
        self._write("start", run_id, resumed, config)
        return Started()

    def log(self, step: int, scalars: Mapping[str, float], images: Mapping[str, bytes]) -> None:
        self._write("log", step, scalars, {name: png[1:4].decode() for name, png in images.items()})

    def finish(self, status: str) -> None:
        self._write("finish", status)


def make(name: str, folder: Path) -> callbacks.Callback:
    options: dict[str, Any] = {"config": CONFIG}
    match name:
        case "lines":
            return callbacks.track(Lines(folder / "lines.jsonl"), name="lines", **options)
        case "tensorboard":
            return callbacks.tensorboard(folder / "tensorboard", **options)
        case "wandb":
            return callbacks.wandb(project="p", name="cloud", dir=str(folder), mode="offline", **options)
        case "mlflow":
            return callbacks.mlflow(tracking_uri=f"sqlite:///{folder}/mlflow.db", run_name="cloud", **options)
        case "trackio":
            return callbacks.trackio("p", name="cloud", **options)
    raise ValueError(name)


def logits(w: Any, batch: Any) -> Any:
    return batch["x"] @ w


def train_step(state: Any, batch: Any) -> Any:
    def loss_fn(w: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits(w, batch), batch["y"])
        return jdist.mean(losses, batch["mask"])

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def eval_step(state: Any, batch: Any) -> Any:
    return {"confusion": CONFUSION.update(logits(state.params, batch), batch["y"], batch["mask"])}


def main(folder: Path, kill_at: int, names: list[str]) -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=64)
    data = {"x": (rng.normal(size=(64, 3)) + y[:, None]).astype(np.float32), "y": y}

    def die(moment: callbacks.Moment) -> None:
        if moment.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    jdist.fit(
        train_step,
        jdist.TrainState.create(params=jnp.zeros((3, 2)), tx=optax.sgd(0.5)),
        data,
        strategy=jdist.one_device(),
        steps=12,
        global_batch=16,
        eval_data=data,
        eval_step=eval_step,
        metrics={"confusion": CONFUSION},
        log_every=1,
        callbacks=[
            callbacks.checkpoint(folder / "checkpoints", every=4),
            *(make(name, folder) for name in names),
            callbacks.Callback(on_save=die),
        ],
        progress=False,
        log_to=None,
        verify="off",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
