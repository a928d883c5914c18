"""Files of logged rows: JSON lines, or a CSV table."""

from __future__ import annotations

import csv as csv_format
import io
import os
from pathlib import Path
from typing import IO, Any

import numpy as np

from jdist.callbacks.callback import Callback, Moment
from jdist.report.files import write_atomically, writing
from jdist.report.metrics_file import MetricsFile


def jsonl(path: str | os.PathLike[str]) -> Callback:
    """Writes each logged row as a line of JSON, whole as soon as it is logged.

    A run that goes on from a checkpoint goes on in the same file, and drops what was written after the checkpoint.

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


def csv(path: str | os.PathLike[str]) -> Callback:
    """Writes the logged rows as a CSV table with a column for everything that was ever measured, a number each.

    Args:
        path: the file, begun anew by each run; folders are made. What an earlier part of a run has measured once an epoch,
            and in evaluations, is there again after it was resumed.

    Returns:
        The callback.

    Raises:
        ConfigError: while training: the file cannot be written.
    """
    where = Path(path)
    columns: dict[str, None] = {}
    handle: list[IO[str]] = []

    def close() -> None:
        while handle:
            with writing(where):
                handle.pop().close()

    def write_all(rows: list[dict[str, Any]]) -> None:
        close()
        text = io.StringIO(newline="")
        table = csv_format.DictWriter(text, columns, lineterminator="\n")
        table.writeheader()
        table.writerows(_scalars(row) for row in rows)
        with writing(where):
            where.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(where, text.getvalue())
        with writing(where):
            handle.append(where.open("a", encoding="utf-8", newline=""))

    def on_row(moment: Moment) -> None:
        if not moment.is_chief or moment.row is None:
            return
        row = _scalars(moment.row)
        if not handle or not columns.keys() >= row.keys():
            for each in moment.history.rows:
                columns.update(dict.fromkeys(_scalars(each)))
            write_all(moment.history.rows)
            return
        with writing(where):
            csv_format.DictWriter(handle[0], columns, lineterminator="\n").writerow(row)
            handle[0].flush()

    return Callback(on_row=on_row, close=close, logs=())


def _scalars(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if isinstance(value, int | float | np.number)}
