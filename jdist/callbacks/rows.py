"""Callbacks that report the logged rows: drawn as they come, written as JSON lines, or as a CSV table."""

from __future__ import annotations

import csv as csv_format
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from rich.console import Console

from jdist.callbacks.callback import Callback, Moment
from jdist.loop.report.files import write_atomically, writing
from jdist.loop.report.metrics_file import COSTS, EPOCH, EVAL, INPUT, OF_ROWS, PREFIXES, STEPS, TRAINING, MetricsFile
from jdist.loop.report.progress import Meter, Reporter, figures, numbers, open_report, percent

_STARVED = 0.2  # of the time of training
_LEAST_WAIT_S = 2.0  # short runs wait for their first batches
_LEAST_SHARE = 0.005


def progress(console: Console | None = None) -> Callback:
    """Draws a bar with figures on a terminal or in a notebook, prints lines anywhere else; of several processes the chief.

    Args:
        console: where to; None: standard output.
    """
    return reporting(console or Console(soft_wrap=True), of_fit=True)


def reporting(console: Console, *, global_batch: int | None = None, of_fit: bool = False) -> Callback:
    """Shows the figures of each logged row."""
    # `global_batch` are the rows of a step, for the rows per second; None: steps are counted.
    # `of_fit` says where a run resumes and why it stopped, which `jdist run` says itself.
    reports: list[Reporter] = []  # the open one, during a run
    meter = Meter(step=0, total=None)
    compiles, is_starved, first = True, False, 0

    def on_start(moment: Moment) -> None:
        nonlocal compiles, is_starved, first, meter
        compiles, is_starved, first = True, False, moment.step
        if moment.is_chief:
            reports.append(open_report(console, step=moment.step, total=moment.total_steps))
            meter = Meter(step=moment.step, total=moment.total_steps, global_batch=global_batch, clock=moment.clock)
            if of_fit and moment.step:
                reports[0].note(f"going on from step {moment.step:,}")

    def on_step(moment: Moment) -> None:
        nonlocal compiles
        if reports and compiles:
            compiles = False
            _ = moment.metrics  # waits for the first step, which is a lap of its own: it compiles
            meter.lap(moment.step)
            reports[0].move(moment.step)

    def on_row(moment: Moment) -> None:
        if not reports or moment.row is None:
            return
        report, row = reports[0], numbers(moment.row)
        costs = {name: row.pop(name) for name in COSTS if name in row}
        newest = {name: value for name, value in row.items() if name not in OF_ROWS and not name.startswith(PREFIXES)}
        if newest:
            report.train(moment.step, newest, meter.lap(moment.step), costs)
        else:
            meter.lap(moment.step)  # the row's own figures restart, and so do these
            report.move(moment.step)
        for prefix, source in ((EPOCH, f"epoch {moment.epoch}"), (EVAL, "evaluation")):
            values = {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}
            if values:
                report.note(f"step {_step_text(moment)}  {source}: {figures(values)}")
        name_starved(moment)

    def name_starved(moment: Moment) -> None:
        nonlocal is_starved
        if not is_starved and (text := starved(moment.spent, moment.step - first)) is not None:
            is_starved = True
            reports[0].note(text)

    def on_end(moment: Moment) -> None:
        if reports and moment.step > first:
            name_starved(moment)
            reports[0].note(summary(moment.spent))
        if reports and of_fit and moment.reason is not None:
            reports[0].note(f"stopped at step {_step_text(moment)}: {moment.reason}{_how_to_go_on(moment)}")

    def close() -> None:
        while reports:
            reports.pop().close()

    return Callback(on_start=on_start, on_step=on_step, on_row=on_row, on_end=on_end, close=close, logs=())


def starved(seconds: Mapping[str, float], steps: int) -> str | None:
    """Names a loader that keeps the devices waiting, with advice in one line; else None."""
    # `seconds` is `Moment.spent`; `steps` were made in them.
    training_s, waited_s = sum(seconds[part] for part in TRAINING), seconds[INPUT]
    if waited_s < _LEAST_WAIT_S or waited_s < _STARVED * training_s:
        return None
    step_s = max(seconds[STEPS], 1e-9)
    return (
        f"waited {percent(waited_s / training_s)} of the time for data: {steps / training_s:.3g} batches a second came, and "
        f"{steps / step_s:.3g} could be trained on. Read them with more workers, in processes where they work in Python, or "
        "decode them once and store them so: docs/input.md"
    )


def summary(seconds: Mapping[str, float]) -> str:
    """Lists what the time of a run went to, the most first."""
    total = sum(seconds.values())
    parts = sorted(((each, part) for part, each in seconds.items() if each >= _LEAST_SHARE * total), reverse=True)
    return "time: " + ", ".join(f"{part} {percent(each / total)}" for each, part in parts)


def _how_to_go_on(moment: Moment) -> str:
    if not moment.interrupted:
        return ""
    if moment.resumes:
        return "; saved: run the same again to go on from there"
    return "; nothing is saved: `callbacks=[jdist.callbacks.checkpoint(folder)]` saves, and goes on from there"


def _step_text(moment: Moment) -> str:
    return f"{moment.step}" if moment.total_steps is None else f"{moment.step}/{moment.total_steps}"


def jsonl(path: str | os.PathLike[str]) -> Callback:
    """Writes each logged row as a complete line of JSON, at the moment of logging.

    A run that goes on from a checkpoint goes on in the same file, and drops what was written after the checkpoint.

    Args:
        path: the file; folders are made. `jdist.fit(log_to=...)` names one by the time.

    Raises:
        ConfigError: while training: the file cannot be written.
    """
    where, file = Path(path), MetricsFile(Path(path))

    def on_start(moment: Moment) -> None:
        nonlocal file
        if moment.is_chief:
            with writing(where):
                where.parent.mkdir(parents=True, exist_ok=True)
            rows = [*moment.history.rows]  # of a run that goes on in another world, where another process may write
            file = MetricsFile.begin(where, rows) if moment.moves else MetricsFile.open(where, step=moment.step)

    def on_row(moment: Moment) -> None:
        if moment.is_chief and moment.row is not None:
            file.write(moment.step, {name: value for name, value in moment.row.items() if name != "step"})

    return Callback(on_start=on_start, on_row=on_row, close=lambda: file.close(), logs=())


def csv(path: str | os.PathLike[str]) -> Callback:
    """Writes the logged rows as a CSV table with a column for everything that was ever measured, a number each.

    Args:
        path: the file, which each run starts again; folders are made. What an earlier part of a run has measured once an epoch,
            and in evaluations, is there again after it was resumed.

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
