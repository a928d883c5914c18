"""Reads a run folder without JAX, also while the run goes on."""

from __future__ import annotations

import datetime
import difflib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jdist.errors import ConfigError
from jdist.experiment.config import Config
from jdist.experiment.load import load
from jdist.experiment.record import RunFolder
from jdist.experiment.repeatable import read_result, read_starts
from jdist.experiment.validate import validate
from jdist.report.curves import points_of
from jdist.report.metric_direction import Mode, better
from jdist.report.metrics_file import EVAL, Row, read_rows
from jdist.report.plain import to_plain
from jdist.report.progress import numbers
from jdist.support.file_lock import is_held

RUNS = Path("runs")
_DEPTH = 3  # runs/SWEEP/RUN, and a folder of theirs


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run, read from its folder.

    Attributes:
        path: the folder.
        config: the config as it was resolved.
        status: "running" while a process holds the folder; "finished" at the last step; else "stopped".
        step: steps done, as far as they were written down.
        total_steps: steps asked for; None if nobody wrote that down.
        rows: the rows of metrics.jsonl.
        changed_at: when metrics were written last, or the config.
    """

    path: Path
    config: Config
    status: Literal["running", "finished", "stopped"]
    step: int
    total_steps: int | None
    rows: list[Row]
    changed_at: datetime.datetime

    @property
    def time_s(self) -> float:
        """Seconds of training."""
        return self.rows[-1].get("time_s", 0.0) if self.rows else 0.0

    @property
    def metric(self) -> str:
        """The evaluation metric that matters, without "eval/": `checkpoint.best`, else the loss."""
        return main_metric(self.config)

    def evaluated(self, metric: str) -> list[tuple[int, float]]:
        """The step and the value of each evaluation, where the value is finite."""
        return points_of(self.rows, EVAL + metric)

    def last(self, metric: str) -> float | None:
        """The value of the last evaluation; NaN where it was not finite, None without one."""
        found = [row[EVAL + metric] for row in self.rows if not isinstance(row.get(EVAL + metric, []), list)]
        return None if not found else math.nan if found[-1] is None else found[-1]

    def best(self, metric: str, mode: Mode | None = None) -> float | None:
        """The best value of all evaluations; the least, where nobody says which is better."""
        found = [value for _, value in self.evaluated(metric)]
        choose = max if (mode or mode_of(self.config, metric)) == "max" else min
        return choose(found) if found else None

    def last_metrics(self) -> dict[str, float]:
        """Every metric's last value, those of training first; arrays are left out."""
        return {k: v for row in self.rows for k, v in numbers(row).items() if k not in ("step", "examples")}

    def as_json(self) -> dict[str, Any]:
        """The run as plain values."""
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
    """The evaluation metric that matters to a config, without "eval/"."""
    return (config.checkpoint.best or "loss").removeprefix(EVAL)


def mode_of(config: Config, metric: str) -> Mode | None:
    """Whether the greatest or the least value of a metric is the best: as the config says, else its name; None: neither."""
    is_best = config.checkpoint.best is not None and metric == main_metric(config)
    return config.checkpoint.mode if is_best else better(metric)


def read_run(path: Path) -> RunSummary:
    """Read a run folder.

    Args:
        path: the folder.

    Raises:
        ConfigError: it is none, or what is in it cannot be read.
    """
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise ConfigError(
            f"{path}: no run folder: there is no config.yaml in it.{near_run(path)} `jdist runs` lists those in runs/."
        )
    config = validate(load(folder.config))
    rows, starts, result = read_rows(folder.metrics), read_starts(folder), read_result(folder)
    total = starts[-1].total_steps if starts else config.train.steps
    done = max(result.step if result else 0, rows[-1]["step"] if rows else 0)
    finished = result is not None and total is not None and result.is_end(total)
    newest = folder.metrics if folder.metrics.is_file() else folder.config
    return RunSummary(
        path=path,
        config=config,
        status="running" if is_held(folder.lock) else "finished" if finished else "stopped",
        step=done,
        total_steps=total,
        rows=rows,
        changed_at=datetime.datetime.fromtimestamp(math.floor(newest.stat().st_mtime), datetime.UTC),
    )


def near_run(path: Path) -> str:
    """A sentence with the run folder that was probably meant, with a leading space; empty where none is near."""
    found = {run.name: run for place in (RUNS, path.parent) if place.is_dir() for run in find_runs(place)}
    near = difflib.get_close_matches(path.name, found, n=1)
    return f" Did you mean '{found[near[0]]}'?" if near else ""


def find_runs(folder: Path) -> Iterator[Path]:
    """The run folders below a folder, or the folder itself, sorted by name.

    Args:
        folder: where to look.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder.{near_run(folder)} `jdist run CONFIG` writes its runs to runs/.")
    for path, below, files in os.walk(folder):
        found = Path(path)
        if "config.yaml" in files and ".lock" in files:
            below.clear()
            yield found
        elif len(found.relative_to(folder).parts) >= _DEPTH:
            below.clear()
        below.sort()
