"""A run's config, state and metrics, read from its folder without JAX, also while the run goes on."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jdist.errors import ConfigError
from jdist.experiment.config import Config
from jdist.experiment.load import load
from jdist.experiment.record import RunFolder, read_result, read_starts
from jdist.experiment.validate import validate
from jdist.loop.report.curves import points_of
from jdist.loop.report.metrics_file import EVAL, SHARES, Mode, Row, better, read_rows, to_plain
from jdist.loop.report.progress import numbers, readable
from jdist.loop.report.times import read_times
from jdist.support.file_lock import is_held
from jdist.support.words import closest

RUNS = Path("runs")
# "running" while a process holds the folder; "failed" if its last start ended with an error, or came to no step.
Status = Literal["running", "finished", "stopped", "failed"]
_DEPTH = 3  # runs/SWEEP/RUN, and a folder of theirs


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run, read from its folder."""

    path: Path  # the folder
    config: Config  # resolved
    status: Status
    step: int  # steps done, as far as recorded
    total_steps: int | None  # of the whole run; None if it was not written down
    rows: list[Row]  # of metrics.jsonl
    changed_at: datetime.datetime  # when metrics were written last, or the config

    @property
    def time_s(self) -> float:
        """Seconds of training, without what came before it, evaluations and saves."""
        return self.rows[-1].get("time_s", 0.0) if self.rows else 0.0

    @property
    def goodput(self) -> float | None:
        """The part of all time that went to steps which were not done again; None if it was not written down."""
        return next((row["goodput"] for row in reversed(self.rows) if "goodput" in row), None)

    @property
    def metric(self) -> str:
        """The evaluation metric that matters, see `main_metric`."""
        return main_metric(self.config)

    def last(self, metric: str) -> float | None:
        """Returns the value of the last evaluation; NaN where it was not finite, None without one."""
        values = [row[EVAL + metric] for row in self.rows if not isinstance(row.get(EVAL + metric, []), list)]
        return None if not values else math.nan if values[-1] is None else values[-1]

    def best(self, metric: str, mode: Mode | None = None) -> float | None:
        """Returns the best finite value of all evaluations; the least, where nothing says which is better."""
        values = [value for _, value in points_of(self.rows, EVAL + metric)]
        choose = max if (mode or mode_of(self.config, metric)) == "max" else min
        return choose(values) if values else None

    def last_metrics(self) -> dict[str, float]:
        """Returns every metric's last value, those of training first; arrays are left out, and shares, which are one row's."""
        left_out = ("step", "examples", *SHARES.values())
        return {k: v for row in self.rows for k, v in numbers(row).items() if k not in left_out}

    def as_json(self) -> dict[str, Any]:
        """Returns the run as plain values."""
        return {
            "folder": str(self.path),
            "name": self.config.name,
            "task": self.config.task.make,
            "strategy": self.config.strategy.name,
            "status": self.status,
            "step": self.step,
            "total_steps": self.total_steps,
            "metric": self.metric,
            "last": to_plain(self.last(self.metric)),
            "best": self.best(self.metric),
            "metrics": self.last_metrics(),
            "time_s": self.time_s,
            "changed_at": self.changed_at.isoformat(timespec="seconds"),
        }


def main_metric(config: Config) -> str:
    """Returns the evaluation metric that matters to a config, without "eval/": `checkpoint.best`, else the loss."""
    return (config.checkpoint.best or "loss").removeprefix(EVAL)


def mode_of(config: Config, metric: str) -> Mode | None:
    """Says whether the greatest or the least value of a metric is the best, by the config, else by its name; None: neither."""
    is_best = config.checkpoint.best is not None and metric == main_metric(config)
    return config.checkpoint.mode if is_best else better(metric)


def read_run(path: Path) -> RunSummary:
    """Reads a run folder."""
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise ConfigError(
            f"{path}: not a run folder: it has no config.yaml.{near_run(path)} `jdist runs` lists those in runs/."
        )
    config = validate(load(folder.config))
    rows, starts, result = read_rows(folder.metrics), read_starts(folder), read_result(folder)
    total = starts[-1].total_steps if starts else config.train.steps
    has_ended = result is not None and total is not None and result.is_end(total)
    step = max(result.step if result else 0, rows[-1]["step"] if rows else 0)
    newest = folder.metrics if folder.metrics.is_file() else folder.config
    return RunSummary(
        path=path,
        config=config,
        status="running" if is_held(folder.lock) else "finished" if has_ended else _status_before_the_end(folder, step),
        step=step,
        total_steps=total,
        rows=rows,
        changed_at=datetime.datetime.fromtimestamp(math.floor(newest.stat().st_mtime), datetime.UTC),
    )


def _status_before_the_end(folder: RunFolder, step: int) -> Status:
    times = read_times(folder.path)  # begun right before the first step
    if not times:
        return "stopped" if step else "failed"
    return "failed" if times[-1].get("outcome") == "failed" else "stopped"


def near_run(path: Path) -> str:
    """Suggests the run folder that was probably meant, as a sentence with a leading space; empty where none is near."""
    runs = {run.name: run for place in (RUNS, path.parent) if place.is_dir() for run in find_runs(place)}
    near = closest(path.name, runs)
    return f" Did you mean '{runs[near]}'?" if near else ""


def find_runs(folder: Path) -> Iterator[Path]:
    """Finds the run folders below a folder, or the folder itself, sorted by name."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder.{near_run(folder)} `jdist run CONFIG` writes its runs to runs/.")
    for name, below, files in os.walk(folder):
        path = Path(name)
        is_run = "config.yaml" in files and ".lock" in files
        if is_run:
            yield path
        if is_run or len(path.relative_to(folder).parts) >= _DEPTH:
            below.clear()
        below.sort()


def figure(value: float | None) -> str:
    """Formats a metric for a cell; `-` for None."""
    return "-" if value is None else readable(value)
