"""Rows into a file, one JSON object a line."""

from __future__ import annotations

import os
from pathlib import Path

from jdist.callbacks.callback import Callback, Moment
from jdist.report.files import writing
from jdist.report.metrics_file import MetricsFile


def jsonl(path: str | os.PathLike[str]) -> Callback:
    """Writes each logged row as a line of JSON, whole as soon as it is logged.

    A run that goes on from a checkpoint goes on in the same file: what was written after the checkpoint is dropped.

    Args:
        path: the file; folders are made. `jdist.fit(log_to=...)` names one by the time.

    Returns:
        The callback.

    Raises:
        ConfigError: while training: the file cannot be written.
    """
    where, file = Path(path), MetricsFile(Path(path))

    def on_start(moment: Moment) -> None:
        nonlocal file
        if moment.is_chief:
            with writing(where):
                where.parent.mkdir(parents=True, exist_ok=True)
            file = MetricsFile.open(where, step=moment.step)

    def on_row(moment: Moment) -> None:
        if moment.is_chief and moment.row is not None:
            file.write(moment.step, {name: value for name, value in moment.row.items() if name != "step"})

    return Callback(on_start=on_start, on_row=on_row, close=lambda: file.close(), logs=())
