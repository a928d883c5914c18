"""`jdist runs`: a list of runs, or two of them side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jdist.cli.runs.summary import RUNS, RunSummary, figure, find_runs, read_run
from jdist.cli.runs.timeline import CHECKPOINT, EVALUATION, LOST, Timeline, describe, read_timeline
from jdist.cli.runs.timeline_picture import draw
from jdist.errors import ConfigError
from jdist.experiment.load import flow
from jdist.experiment.record import RunFolder, read_starts
from jdist.loop.report.curves import plot_runs
from jdist.loop.report.files import write_atomically
from jdist.loop.report.progress import duration, percent
from jdist.support.signature import dotted, leaves
from jdist.support.table import Table


def compare(a: RunSummary, b: RunSummary, *, as_json: bool = False) -> str:
    """Compares two runs in tables or JSON, and draws their curves next to the first."""
    by_name = a.path.name != b.path.name
    names = tuple(run.path.name if by_name else str(run.path) for run in (a, b))
    config = _differences(*(dict(leaves(run.config.model_dump())) for run in (a, b)))
    config = {dotted(key): pair for key, pair in config.items() if key not in (("name",), ("log", "folder"))}
    starts = [read_starts(RunFolder(run.path))[-1:] for run in (a, b)]
    environment = _differences(*(start[0].environment if start else {} for start in starts))
    last = a.last_metrics(), b.last_metrics()
    metrics = {name: (last[0].get(name), last[1].get(name)) for name in {**last[0], **last[1]}}
    picture = a.path.parent / f"{a.path.name}_and_{b.path.name}.png"
    drawn = plot_runs(dict(zip(names, (a.rows, b.rows), strict=True)), picture, title=" and ".join(names))
    if as_json:
        differences = {"config": config, "environment": environment, "metrics": metrics, "curves": drawn}
        return json.dumps({"runs": [a.as_json(), b.as_json()], **differences}, indent=1)

    def table(name: str, pairs: dict, texts: Callable[[Any, Any], tuple[str, ...]], if_empty: str) -> str:
        rows = [[key, *texts(x, y)] for key, (x, y) in pairs.items()]
        return str(Table("", rows, [name, *names])) if rows else if_empty

    tables = [table("config", config, _texts, "the configs are alike")]
    if all(starts):
        tables.append(table("environment", environment, _texts, "the environments are alike"))
    tables.append(table("last of", metrics, lambda x, y: (figure(x), figure(y)), "neither has measured anything yet"))
    return "\n\n".join([*tables, drawn])


def _differences(a: dict, b: dict) -> dict:
    """Finds the keys with different values, and both values; None for a missing one."""
    return {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}


def _texts(*values: Any) -> tuple[str, ...]:
    """Writes two values that differ, long ones from shortly before the first difference."""
    texts = tuple(flow(value) for value in values)
    common = next((n for n, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), 0)
    start = max(0, common - 20) if max(map(len, texts)) > 60 else 0
    texts = tuple("..." * (start > 0) + text[start:] for text in texts)
    return tuple(text if len(text) <= 60 else text[:57] + "..." for text in texts)


def show_timeline(folders: Sequence[str], *, as_json: bool = False) -> int:
    """Prints a run's timeline, and writes timeline.svg and timeline.json (for Perfetto)."""
    if len(folders) != 1:
        raise ConfigError(f"`jdist runs --timeline` takes one run, got {len(folders)}.")
    path = _folder(folders[0])
    timeline = read_timeline(path)
    picture, perfetto = path / "timeline.svg", path / "timeline.json"
    write_atomically(picture, str(draw(timeline)))
    write_atomically(perfetto, json.dumps(trace(timeline)) + "\n")
    if as_json:
        print(json.dumps(timeline.as_json() | {"svg": str(picture), "perfetto": str(perfetto)}, indent=1))
    else:
        print(f"{timeline}\npicture: {picture}\ntrace: {perfetto}, for https://ui.perfetto.dev")
    return 0


def show(folders: Sequence[str], *, as_json: bool = False) -> int:
    """Prints a list of runs, or two side by side; unreadable ones come last, with reasons."""
    if len(folders) > 2:
        raise ConfigError(f"`jdist runs` lists one folder or compares two runs, got {len(folders)}.")
    if len(folders) == 2:
        print(compare(*(read_run(_folder(name)) for name in folders), as_json=as_json))
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


def _folder(name: str) -> Path:
    """Finds a run folder by its path, or by its name in runs/."""
    return Path(name) if Path(name).is_dir() or not (RUNS / name).is_dir() else RUNS / name


def _as_json(runs: Sequence[RunSummary], unreadable: Mapping[Path, str]) -> str:
    broken = [{"folder": str(path), "status": "unreadable", "reason": reason} for path, reason in unreadable.items()]
    return json.dumps([*(run.as_json() for run in runs), *broken], indent=1)


def _list(runs: Sequence[RunSummary], unreadable: Mapping[Path, str]) -> str:
    tables = [_table(runs)] if runs else []
    broken = [f"{path}: unreadable: {reason}" for path, reason in unreadable.items()]
    return "\n".join(tables + broken) or "no runs here"


def _table(runs: Sequence[RunSummary]) -> str:
    header = ["run", "task", "strategy", "step", "metric", "last", "best", "trained", "goodput", "status", "when"]
    rows = [
        [
            str(run.path),
            run.config.task.make.removeprefix("jdist.tasks.").removesuffix(":make"),
            run.config.strategy.name,
            f"{run.step:,}/{'?' if run.total_steps is None else f'{run.total_steps:,}'}",
            run.metric,
            figure(run.last(run.metric)),
            figure(run.best(run.metric)),
            duration(run.time_s),
            "-" if run.goodput is None else percent(run.goodput),
            run.status,
            f"{run.changed_at.astimezone():%Y-%m-%d %H:%M}",
        ]
        for run in runs
    ]
    return str(Table("", rows, header))


_RUN = 1  # the number of the run among the trace's processes; those of the job follow
_LANES = {"attempts": 1, "time": 2, "evaluations": 3, "checkpoints": 4, "steps done again": 5}
_LANE_OF = {EVALUATION: "evaluations", CHECKPOINT: "checkpoints", LOST: "steps done again"}


def trace(timeline: Timeline) -> dict[str, Any]:
    """Makes a timeline's trace for https://ui.perfetto.dev, in the Trace Event Format."""
    # It has complete events ("X") of attempts, parts and processes, a counter ("C") of steps,
    # instants ("i") of restarts, kills and signals, and metadata ("M") with the names. Times are in
    # microseconds from the beginning. See
    # https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    events: list[dict[str, Any]] = []

    def us(at: float) -> int:
        return round((at - timeline.begin) * 1e6)

    def name_lane(kind: str, lane: tuple[int, int], name: str) -> None:
        events.append({"name": kind, "ph": "M", "pid": lane[0], "tid": lane[1], "args": {"name": name}})

    def add(
        category: str,
        name: str,
        lane: tuple[int, int],
        at: float,
        until: float | None = None,
        *,
        s: str = "g",
        **args: Any,
    ) -> None:
        """Adds a stretch of time, or without `until` an instant, which concerns the run or a process (`s`)."""
        kind = {"ph": "i", "s": s} if until is None else {"ph": "X", "dur": us(until) - us(at)}
        place = {"ts": us(at), "pid": lane[0], "tid": lane[1]}
        events.append({"name": name, "cat": category, **kind, **place, "args": args})

    name_lane("process_name", (_RUN, 0), f"run {timeline.name}")
    for name, number in _LANES.items():
        name_lane("thread_name", (_RUN, number), name)
    of_attempts = (_RUN, _LANES["attempts"])
    for attempt in timeline.attempts:
        add(
            *("attempt", f"attempt {attempt.number}: {attempt.outcome}", of_attempts, attempt.begin, attempt.end),
            first_step=attempt.first,
            last_step=attempt.last,
            kept_step=attempt.kept,
            steps_done_again=attempt.lost_steps,
            outcome=attempt.outcome,
        )
        if attempt.number:
            add("restart", f"restart from step {attempt.first:,}", of_attempts, attempt.begin)
        if attempt.outcome in ("killed", "failed"):
            add("end", attempt.outcome, of_attempts, attempt.end, what=describe(timeline, attempt))
        for span in attempt.spans:
            lane = (_RUN, _LANES[_LANE_OF.get(span.part, "time")])
            args: dict[str, Any] = {"first_step": span.first, "last_step": span.last, "attempt": attempt.number}
            add("part", span.part, lane, span.begin, span.end, **args)
            counter = {"ph": "C", "cat": "steps", "pid": _RUN, "tid": 0, "name": "step"}
            events.append({**counter, "ts": us(span.end), "args": {"step": span.last}})
    for number, name in enumerate(dict.fromkeys(process.name for process in timeline.processes), start=_RUN + 1):
        name_lane("process_name", (number, 0), name)
        name_lane("thread_name", (number, 1), name)
        for process in timeline.processes:
            if process.name == name:
                end = timeline.end_of(process)
                args = {"code": process.code, "how": process.how, "attempt": process.attempt}
                add("process", name, (number, 1), process.begin, end, **args)
                if process.code not in (0, None):
                    add("end", process.how, (number, 1), end, s="p", **args)
    for at, name in timeline.signals:
        add("signal", name, of_attempts, at)
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0)))
    other = {"run": timeline.name, "began_at": timeline.begin, "written_by": "jdist runs --timeline"}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
