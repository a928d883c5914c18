"""The runs of a sweep, `--grid KEY=V1,V2,...`, and their results: one table, as text, CSV and JSON, and one picture."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jdist.cli.runs.summary import RunSummary, figure
from jdist.errors import ConfigError
from jdist.experiment.load import flow, parse
from jdist.loop.report.curves import plot_runs
from jdist.loop.report.files import write_atomically
from jdist.loop.report.metrics_file import to_plain
from jdist.loop.report.progress import duration
from jdist.support.table import Table

_MOST_RUNS = 10_000
_MOST_LETTERS = 24  # of a value in a name


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One key of a grid."""

    key: str  # with dots
    label: str  # what to call it, unlike all others of the grid
    values: tuple[str, ...]  # what to try, as written in YAML


@dataclass(frozen=True, kw_only=True, eq=False)
class Point:
    """One run of a grid."""

    name: str  # of the run, unlike all others of the grid
    values: dict[str, str]  # the value of each axis, by its label
    overrides: tuple[str, ...]  # for `jdist run`


def parse_grid(grid: Sequence[str]) -> list[Axis]:
    """Reads the arguments of `--grid`, `KEY=V1,V2,...` each: an axis for each, in order."""
    if not grid:
        raise ConfigError("a sweep needs something to try: say --grid KEY=V1,V2,... , as --grid train.seed=0,1,2.")
    pairs = [_parse(text) for text in grid]
    times = Counter(key for key, _ in pairs)
    for text, (key, _) in zip(grid, pairs, strict=True):
        if times[key] > 1:
            raise ConfigError(f"--grid {text}: {key} is given twice. Write all of its values in one --grid.")
        if key in ("name", "log.folder"):
            raise ConfigError(f"--grid {text}: a sweep names its runs and their folder itself. Leave it out.")
    count = math.prod(len(values) for _, values in pairs)
    if count > _MOST_RUNS:
        raise ConfigError(f"the grid has {count:,} runs; a sweep takes at most {_MOST_RUNS:,}. Try fewer values.")
    times = Counter(_short(key) for key, _ in pairs)
    return [Axis(key=k, label=_short(k) if times[_short(k)] == 1 else k, values=values) for k, values in pairs]


def points(axes: Sequence[Axis]) -> list[Point]:
    """Makes a run of every combination, the last axis fastest."""
    points = [
        Point(
            name="_".join(map(_word, axes, values))[:150],
            values={axis.label: value for axis, value in zip(axes, values, strict=True)},
            overrides=tuple(f"{axis.key}={value}" for axis, value in zip(axes, values, strict=True)),
        )
        for values in itertools.product(*(axis.values for axis in axes))
    ]
    if len({point.name for point in points}) < len(points):  # cut short, or of values that differ in odd characters
        digits = len(str(len(points) - 1))
        points = [dataclasses.replace(point, name=f"{i:0{digits}}") for i, point in enumerate(points)]
    return points


def _parse(text: str) -> tuple[str, tuple[str, ...]]:
    """Reads the key of one `--grid`, and its values: a list of YAML, so a mapping may hold commas."""
    key, equals, written = text.partition("=")
    if not equals or not written.strip() or not all(part and part == part.strip() for part in key.split(".")):
        raise ConfigError(f"--grid {text}: a grid is KEY=V1,V2,... with a dotted key, as in train.seed=0,1,2.")
    parsed, _, problems = parse(f"[{written}]", f"--grid {text}", line_numbers=False, within=tuple(key.split(".")))
    if problems:
        raise ConfigError(problems[0])
    values = tuple(flow(value) for value in parsed)
    again = next((value for value, times in Counter(values).items() if times > 1), None)
    if not values or again is not None:
        what = f"the value {again} is there twice" if values else "it has no value"
        raise ConfigError(f"--grid {text}: {what}. Each value makes a run.")
    return key, values


def _short(key: str) -> str:
    """Returns the last part of a key; of `strategy.name` the part before."""
    *above, last = key.split(".")
    return above[-1] if above and last in ("name", "schedule") else last


def _word(axis: Axis, value: str) -> str:
    """Writes a value as a part of a name: itself if it is short and plain, else its number on the axis."""
    is_plain = re.fullmatch(rf"[A-Za-z0-9._-]{{1,{_MOST_LETTERS}}}", value)
    return f"{axis.label}-{value if is_plain else axis.values.index(value)}"


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
