"""Logged rows for TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

from jdist.callbacks.callback import Callback, Moment
from jdist.errors import ConfigError


def tensorboard(folder: str | os.PathLike[str]) -> Callback:
    """Writes every number of each logged row as a scalar, an array as a histogram.

    Args:
        folder: for `tensorboard --logdir`.

    Returns:
        The callback.

    Raises:
        ConfigError: tensorboardX is not installed: `pip install 'jdist[tensorboard]'`.
    """
    try:
        service = importlib.import_module("tensorboardX")
    except ModuleNotFoundError as exc:
        raise ConfigError(
            "tensorboard: tensorboardX, which writes its files, is not installed: pip install 'jdist[tensorboard]'"
        ) from exc
    writers: list[Any] = []

    def on_row(moment: Moment) -> None:
        if not moment.is_chief or moment.row is None:
            return
        if not writers:
            writers.append(service.SummaryWriter(os.fspath(folder)))
        for name, value in moment.row.items():
            if name == "step":
                continue
            if isinstance(value, int | float):
                writers[0].add_scalar(name, value, moment.step)
            elif isinstance(value, np.ndarray):
                writers[0].add_histogram(name, value, moment.step)
        writers[0].flush()  # a run that is killed has its rows

    def close() -> None:
        while writers:
            writers.pop().close()

    return Callback(on_row=on_row, close=close, logs=())


def wandb(**options: Any) -> Callback:
    """Logs each row to Weights & Biases.

    Args:
        **options: for `wandb.init`: `project`, `name`, `config`, `mode="offline"`, ...

    Returns:
        The callback.

    Raises:
        ConfigError: wandb is not installed: `pip install 'jdist[wandb]'`.
    """
    try:
        service = importlib.import_module("wandb")
    except ModuleNotFoundError as exc:
        raise ConfigError("wandb: it is not installed: pip install 'jdist[wandb]'") from exc
    runs: list[Any] = []

    def on_row(moment: Moment) -> None:
        if not moment.is_chief or moment.row is None:
            return
        if not runs:
            runs.append(service.init(**options))
        values = {
            name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in moment.row.items()
        }
        runs[0].log(values, step=moment.step)

    def close() -> None:
        while runs:
            runs.pop().finish()

    return Callback(on_row=on_row, close=close, logs=())
