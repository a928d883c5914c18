"""`jdist runs`: a list of runs, or two of them side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from jdist.errors import ConfigError
from jdist.report.progress import duration
from jdist.runs.compare import compare
from jdist.runs.summary import RUNS, RunSummary, find_runs, read_run
from jdist.runs.table import columns, figure, local_time


def show(folders: Sequence[str], *, as_json: bool = False) -> int:
    """Print what the command line asks for; of a list, runs that cannot be read come last, each with the reason.

    Args:
        folders: none or one to list, or two run folders to compare.
        as_json: print JSON.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: there is no such run, or more than two are given.
    """
    if len(folders) > 2:
        raise ConfigError(f"`jdist runs` lists one folder or compares two runs, and {len(folders)} are given.")
    if len(folders) == 2:
        print(compare(*(read_run(_found(name)) for name in folders), as_json=as_json))
        return 0
    runs: list[RunSummary] = []
    unreadable: dict[Path, str] = {}
    for path in find_runs(Path(folders[0]) if folders else RUNS):
        try:
            runs.append(read_run(path))
        except ConfigError as exc:  # a broken folder hides no other
            unreadable[path] = str(exc)
    print(_as_json(runs, unreadable) if as_json else _list(runs, unreadable))
    return 0


def _found(name: str) -> Path:
    """A run folder by its path, or by its name in runs/."""
    return Path(name) if Path(name).is_dir() or not (RUNS / name).is_dir() else RUNS / name


def _as_json(runs: Sequence[RunSummary], unreadable: Mapping[Path, str]) -> str:
    broken = [{"folder": str(path), "status": "unreadable", "reason": reason} for path, reason in unreadable.items()]
    return json.dumps([*(run.as_json() for run in runs), *broken], indent=1)


def _list(runs: Sequence[RunSummary], unreadable: Mapping[Path, str]) -> str:
    tables = [_table(runs)] if runs else []
    broken = [f"{path}: unreadable: {reason}" for path, reason in unreadable.items()]
    return "\n".join(tables + broken) or "no runs here"


def _table(runs: Sequence[RunSummary]) -> str:
    header = ["run", "task", "strategy", "step", "metric", "last", "best", "time", "status", "when"]
    rows = [
        [
            str(run.path),
            _task(run.config.task.make),
            run.config.strategy.name,
            f"{run.step:,}/{'?' if run.total_steps is None else f'{run.total_steps:,}'}",
            run.metric,
            figure(run.last(run.metric)),
            figure(run.best(run.metric)),
            duration(run.time_s),
            run.status,
            local_time(run.changed_at),
        ]
        for run in runs
    ]
    return columns(header, rows, right=["step", "last", "best", "time"])


def _task(make: str) -> str:
    """`digits` for `jdist.tasks.digits:make`, else the import path."""
    return make.removeprefix("jdist.tasks.").removesuffix(":make")
