"""Curves of several runs in one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jdist.report.curves import NO_MATPLOTLIB, new_figure, png, points_of
from jdist.report.files import write_atomically
from jdist.report.metrics_file import COSTS, EPOCH, EVAL, OF_ROWS, Row

_MOST_PANELS = 6
_DISTINCT = 10  # colours that people tell apart
_EVALUATION: dict[str, Any] = {"marker": "o", "markersize": 3.5}
_TRAINING: dict[str, Any] = {"alpha": 0.4, "linewidth": 1}


def plot_runs(
    runs: Mapping[str, Sequence[Row]], path: Path, *, title: str, metrics: Sequence[str] | None = None
) -> str:
    """Draws each metric of several runs into its own panel; returns a line about the result."""
    # Evaluations are drawn if a run has any, over faint training curves; else those alone.
    # `metrics` None: all that was measured, the loss first. The PNG is replaced atomically.
    if metrics is None:
        columns = dict.fromkeys(name for rows in runs.values() for row in rows for name in row)
        measured = dict.fromkeys(name.removeprefix(EVAL) for name in columns if not name.startswith(EPOCH))
        metrics = sorted((name for name in measured if name not in OF_ROWS + COSTS), key=lambda name: name != "loss")
    metrics = [m for m in metrics if any(points_of(r, c) for r in runs.values() for c in (m, EVAL + m))][:_MOST_PANELS]
    if not metrics:
        return "no curves drawn, nothing was measured"
    figure = new_figure(len(metrics))
    if figure is None:
        return NO_MATPLOTLIB
    many = len(runs) > _DISTINCT
    legend, faint = {}, False
    for panel, metric in zip(figure.panels, metrics, strict=True):
        for i, (label, rows) in enumerate(runs.items()):
            evaluations, training = points_of(rows, EVAL + metric), points_of(rows, metric)
            color = figure.shade(i / (len(runs) - 1)) if many else f"C{i}"
            if evaluations:
                if training and not many:
                    faint = True
                    panel.plot(*zip(*training, strict=True), color=color, **_TRAINING)
                legend[label] = panel.plot(*zip(*evaluations, strict=True), color=color, label=label, **_EVALUATION)[0]
            elif training:
                legend[label] = panel.plot(*zip(*training, strict=True), color=color, linewidth=1, label=label)[0]
        panel.set_ylabel(metric)
    first = figure.panels[0]
    first.set_title(title)
    if faint:  # what the colours do not say
        for name, style in (("evaluation", _EVALUATION), ("training", _TRAINING)):
            legend[name] = first.plot([], [], color="grey", label=name, **style)[0]
    # Beside the first panel, so that it hides no curve however many runs there are.
    first.legend(handles=list(legend.values()), frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    write_atomically(path, png(figure))
    return f"curves: {path}"
