"""Rows for Weights & Biases."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from jdist.callbacks.callback import Callback, Moment
from jdist.errors import ConfigError


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
