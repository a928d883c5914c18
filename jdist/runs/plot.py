"""Curves of several runs in one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jdist.report.curves import EPOCH, EVAL, NOT_MEASURED, new_figure, png, points_of
from jdist.report.files import write_atomically
from jdist.report.metrics_file import Row

_MOST_PANELS = 6
_DISTINCT = 10  # colours that people tell apart


def plot_runs(
    runs: Mapping[str, Sequence[Row]], path: Path, *, title: str, metrics: Sequence[str] | None = None
) -> str:
    """Draw each metric of several runs into a panel of its own.

    Evaluations are drawn where a run has any; else what was measured in training.

    Args:
        runs: the rows of each run's metrics.jsonl, by what to call it.
        path: the PNG to write, replaced as a whole.
        title: heading of the figure.
        metrics: what to draw, a panel each; None: all that was measured, the loss first.

    Returns:
        One line that says what was done, or why nothing was.

    Raises:
        ConfigError: the file cannot be written.
    """
    if metrics is None:
        columns = dict.fromkeys(name for rows in runs.values() for row in rows for name in row)
        measured = dict.fromkeys(name.removeprefix(EVAL) for name in columns if not name.startswith(EPOCH))
        metrics = sorted((name for name in measured if name not in NOT_MEASURED), key=lambda name: name != "loss")
    metrics = [m for m in metrics if any(points_of(r, c) for r in runs.values() for c in (m, EVAL + m))][:_MOST_PANELS]
    if not metrics:
        return "no curves drawn, nothing was measured"
    figure = new_figure(len(metrics))
    if figure is None:
        return "no curves drawn, matplotlib is not installed: pip install 'jdist[examples]'"
    many = len(runs) > _DISTINCT
    for panel, metric in zip(figure.panels, metrics, strict=True):
        for i, (label, rows) in enumerate(runs.items()):
            held_out = points_of(rows, EVAL + metric)
            color = figure.shade(i / (len(runs) - 1)) if many else f"C{i}"
            if held_out:
                training = points_of(rows, metric)
                if training and not many:
                    panel.plot(*zip(*training, strict=True), color=color, alpha=0.25, linewidth=1)
                panel.plot(*zip(*held_out, strict=True), color=color, marker="o", markersize=3.5, label=label)
            elif training := points_of(rows, metric):
                panel.plot(*zip(*training, strict=True), color=color, linewidth=1, label=f"{label}, training")
        panel.set_ylabel(metric)
    figure.panels[0].set_title(title)
    # Beside the first panel, so that it hides no curve however many runs there are.
    figure.panels[0].legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    write_atomically(path, png(figure))
    return f"curves: {path}"
