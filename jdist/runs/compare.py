"""Two runs side by side: the config keys in which they differ, their last metrics, their curves in one picture."""

from __future__ import annotations

import json

from jdist.experiment.load import dotted, leaves
from jdist.experiment.record import RunFolder
from jdist.experiment.render import flow
from jdist.experiment.repeatable import read_starts
from jdist.runs.plot import plot_runs
from jdist.runs.summary import RunSummary
from jdist.runs.table import columns, figure


def compare(a: RunSummary, b: RunSummary, *, as_json: bool = False) -> str:
    """Compare two runs, and draw their curves into a picture beside the first.

    Args:
        a: a run.
        b: another one.
        as_json: return JSON instead of tables.

    Returns:
        What to print.

    Raises:
        ConfigError: the picture cannot be written.
    """
    names = _names(a, b)
    config = _differences(*(dict(leaves(run.config.model_dump())) for run in (a, b)))
    config = {dotted(key): pair for key, pair in config.items() if key not in (("name",), ("log", "folder"))}
    started = [read_starts(RunFolder(run.path)) for run in (a, b)]
    environment = _differences(*(starts[-1].environment if starts else {} for starts in started))
    last = a.last_metrics(), b.last_metrics()
    metrics = {name: (last[0].get(name), last[1].get(name)) for name in {**last[0], **last[1]}}
    picture = a.path.parent / f"{a.path.name}_and_{b.path.name}.png"
    drawn = plot_runs(dict(zip(names, (a.rows, b.rows), strict=True)), picture, title=" and ".join(names))
    if as_json:
        found = {"config": config, "environment": environment, "metrics": metrics, "curves": drawn}
        return json.dumps({"runs": [a.as_json(), b.as_json()], **found}, indent=1)
    tables = [
        columns(["config", *names], [[key, _text(x), _text(y)] for key, (x, y) in config.items()])
        if config
        else "the configs are alike",
    ]
    if all(started):
        rows = [[key, _text(x), _text(y)] for key, (x, y) in environment.items()]
        tables.append(columns(["environment", *names], rows) if rows else "the environments are alike")
    rows = [[name, figure(x), figure(y)] for name, (x, y) in metrics.items()]
    tables.append(columns(["last of", *names], rows, right=names) if rows else "neither has measured anything yet")
    return "\n\n".join([*tables, drawn])


def _names(a: RunSummary, b: RunSummary) -> tuple[str, str]:
    """What to call them: by their folders' names, or by the paths where these are alike."""
    return (a.path.name, b.path.name) if a.path.name != b.path.name else (str(a.path), str(b.path))


def _differences(a: dict, b: dict) -> dict:
    """The keys whose values differ, with both; None for one that is not there."""
    return {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}


def _text(value: object) -> str:
    text = flow(value)
    return text if len(text) <= 60 else text[:57] + "..."
