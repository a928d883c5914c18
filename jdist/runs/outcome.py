"""A sweep's results: one table, as text, CSV and JSON, and one picture."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jdist.report.files import write_atomically
from jdist.report.metrics_file import to_plain
from jdist.report.progress import duration
from jdist.runs.grid import Point
from jdist.runs.plot import plot_runs
from jdist.runs.summary import RunSummary, figure
from jdist.support.table import Table


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The order of a sweep's runs."""

    metric: str  # of the last evaluation
    mode: Literal["max", "min"]  # whether the greatest or the least value comes first

    def __call__(self, run: RunSummary | None) -> tuple[bool, float]:
        """Makes a key to sort by; what has no value, or none that is finite, comes last."""
        value = None if run is None else run.last(self.metric)
        return (True, 0.0) if value is None or math.isnan(value) else (False, -value if self.mode == "max" else value)


def write_outcome(
    folder: Path,
    trials: Sequence[Point],
    done: Mapping[Point, RunSummary],
    failures: Mapping[Point, str],
    ranking: Ranking,
) -> str:
    """Writes table.txt, table.csv, table.json and curves.png; returns the text to print."""
    # `trials` are all runs of the sweep's folder, `done` the finished ones, `failures` the reasons
    # of the others.
    best_first = sorted(trials, key=lambda trial: ranking(done.get(trial)))
    labels = _labels(trials[0], ranking.metric)
    rows = [_row(trial, labels, done.get(trial), failures.get(trial), ranking) for trial in best_first]
    text = _table(rows, labels, ranking.metric)
    write_atomically(folder / "table.txt", text + "\n")
    write_atomically(folder / "table.json", json.dumps(to_plain(rows), indent=1) + "\n")
    write_atomically(folder / "table.csv", _csv(rows))
    curves = {", ".join(f"{k}={v}" for k, v in t.values.items()): done[t].rows for t in best_first if t in done}
    drawn = plot_runs(curves, folder / "curves.png", title=folder.name, metrics=[ranking.metric])
    lines = [text, f"table: {folder / 'table.txt'}, .csv and .json", drawn]
    if done and all(run.last(ranking.metric) is None for run in done.values()):
        measured = sorted({name for run in done.values() for name in run.last_metrics()})
        lines.append(f"no evaluation has the metric {ranking.metric}; measured were {', '.join(measured)}")
    return "\n".join(lines)


def _labels(trial: Point, metric: str) -> list[str]:
    """Names the columns of the axes: by the whole key where another column has the short name."""
    others = {"run", metric, f"best {metric}", "steps", "time_s", "trained", "status"}
    keys = (override.partition("=")[0] for override in trial.overrides)
    return [key if label in others else label for label, key in zip(trial.values, keys, strict=True)]


def _row(
    trial: Point, labels: Sequence[str], run: RunSummary | None, failure: str | None, ranking: Ranking
) -> dict[str, Any]:
    metric = ranking.metric
    return {
        "run": trial.name,
        **dict(zip(labels, trial.values.values(), strict=True)),
        metric: run and run.last(metric),
        f"best {metric}": run and run.best(metric, ranking.mode),
        "steps": run.step if run else 0,
        "time_s": run and run.time_s,
        "status": "finished" if run else f"failed: {failure}" if failure else "not run",
    }


def _table(rows: Sequence[Mapping[str, Any]], labels: Sequence[str], metric: str) -> str:
    best = f"best {metric}"
    cells = [
        [
            *(row[label] for label in labels),
            figure(row[metric]),
            figure(row[best]),
            f"{row['steps']:,}",
            "-" if row["time_s"] is None else duration(row["time_s"]),
            row["status"],
        ]
        for row in rows
    ]
    return str(Table("", cells, [*labels, metric, best, "steps", "trained", "status"]))


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
