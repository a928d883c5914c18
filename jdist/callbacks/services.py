"""Logged rows for TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from jdist.callbacks.callback import Callback, Moment
from jdist.errors import ConfigError
from jdist.report.metrics_file import Row


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

    def write(writer: Any, moment: Moment, row: Row) -> None:
        for name, value in row.items():
            if name == "step":
                continue
            if isinstance(value, int | float):
                writer.add_scalar(name, value, moment.step)
            elif isinstance(value, np.ndarray):
                writer.add_histogram(name, value, moment.step)

    # A run that is killed has its rows but for the last second's: the writer's thread flushes as often, and its `flush` does
    # not wait for that thread.
    return _logging(
        lambda: service.SummaryWriter(os.fspath(folder), flush_secs=1), write, lambda writer: writer.close()
    )


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

    def write(run: Any, moment: Moment, row: Row) -> None:
        values = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}
        run.log(values, step=moment.step)

    return _logging(lambda: service.init(**options), write, lambda run: run.finish())


def _logging(
    begin: Callable[[], Any], write: Callable[[Any, Moment, Row], None], end: Callable[[Any], None]
) -> Callback:
    """Makes a callback of the chief that begins a log at the first row, and ends it with the run."""
    begun: list[Any] = []

    def on_row(moment: Moment) -> None:
        if not moment.is_chief or moment.row is None:
            return
        if not begun:
            begun.append(begin())
        write(begun[0], moment, moment.row)

    def close() -> None:
        while begun:
            end(begun.pop())

    return Callback(on_row=on_row, close=close, logs=())
