"""Pictures of runs: curves, the loss first and each other metric in a panel below, and confusion matrices."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jdist.loop.report.files import write_atomically
from jdist.loop.report.metrics_file import COSTS, EPOCH, EVAL, OF_ROWS, Row

NO_MATPLOTLIB = "no curves drawn, matplotlib is not installed: pip install matplotlib"
_MOST_PANELS = 6
_DISTINCT = 10  # colours that people tell apart
_EVALUATION: dict[str, Any] = {"marker": "o", "markersize": 3.5}
_TRAINING: dict[str, Any] = {"alpha": 0.4, "linewidth": 1}
_MOST_COUNTED = 20  # rows of a matrix with a number in each cell; of more the colours alone can be read


def new_figure(num_panels: int) -> Any:
    """Makes an empty figure of matplotlib with panels (`axes`) below each other; None if that is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError:
        return None
    figure = Figure(figsize=(7, 3 * num_panels), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.subplots(num_panels, 1, sharex=True)
    for panel in figure.axes:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.axes[-1].set_xlabel("step")
    figure.axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return figure


def png(figure: Any) -> bytes:
    """Draws a figure as a PNG."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def points_of(rows: Sequence[Mapping[str, Any]], column: str) -> list[tuple[int, float]]:
    """Lists step and value of each row that has a number in a column."""
    return [(row["step"], row[column]) for row in rows if isinstance(row.get(column), int | float)]


def plot_curves(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> str:
    """Draws a run's curves into a PNG, replaced atomically; returns a line about the result."""
    picture = as_png(rows, title=title)
    if isinstance(picture, str):
        return picture
    write_atomically(path, picture)
    return f"curves: {path}"


def as_png(rows: Sequence[Mapping[str, Any]], *, title: str) -> bytes | str:
    """Draws the curves of a run's rows as a PNG; otherwise returns the reason for its absence."""
    measured = dict.fromkeys(
        name.removeprefix(EVAL).removeprefix(EPOCH)
        for row in rows
        for name, value in row.items()
        if name not in OF_ROWS + COSTS and (value is None or isinstance(value, int | float))
    )
    names = sorted(measured, key=lambda name: name != "loss")[:_MOST_PANELS]
    if not names:
        return "no curves drawn, nothing was measured"
    figure = new_figure(len(names))
    if figure is None:
        return NO_MATPLOTLIB
    for panel, name in zip(figure.axes, names, strict=True):
        for label, column, style in (
            ("training", name, {"color": "C0", "alpha": 0.6, "linewidth": 1}),
            ("training, mean of an epoch", EPOCH + name, {"color": "C0", "marker": "o", "markersize": 3.5}),
            ("evaluation", EVAL + name, {"color": "C1", "marker": "o", "markersize": 3.5}),
        ):
            points = points_of(rows, column)
            if points:
                dot = {"marker": "o", "markersize": 3} if len(points) == 1 else {}  # a line needs two points
                panel.plot(*zip(*points, strict=True), label=label, **(style | dot))
        panel.set_ylabel(name)
        if panel.lines:
            panel.legend(frameon=False)
    figure.axes[0].set_title(title)
    return png(figure)


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
    from matplotlib import colormaps

    shade, many = colormaps["viridis"], len(runs) > _DISTINCT
    legend, faint = {}, False
    for panel, metric in zip(figure.axes, metrics, strict=True):
        for i, (label, rows) in enumerate(runs.items()):
            evaluations, training = points_of(rows, EVAL + metric), points_of(rows, metric)
            color = shade(i / (len(runs) - 1)) if many else f"C{i}"
            if evaluations:
                if training and not many:
                    faint = True
                    panel.plot(*zip(*training, strict=True), color=color, **_TRAINING)
                legend[label] = panel.plot(*zip(*evaluations, strict=True), color=color, label=label, **_EVALUATION)[0]
            elif training:
                legend[label] = panel.plot(*zip(*training, strict=True), color=color, linewidth=1, label=label)[0]
        panel.set_ylabel(metric)
    first = figure.axes[0]
    first.set_title(title)
    if faint:  # what the colours do not say
        for name, style in (("evaluation", _EVALUATION), ("training", _TRAINING)):
            legend[name] = first.plot([], [], color="grey", label=name, **style)[0]
    # Next to the first panel, so that it hides no curve however many runs there are.
    first.legend(handles=list(legend.values()), frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    write_atomically(path, png(figure))
    return f"curves: {path}"


def matrix_as_png(matrix: np.ndarray, *, title: str) -> bytes | None:
    """Draws a [labels, predictions] matrix as a PNG, shaded by row; None without matplotlib."""
    figure = new_figure(1)
    if figure is None:
        return None
    figure.set_size_inches(5, 5)
    panel = figure.axes[0]
    panel.grid(False)
    totals = matrix.sum(1, keepdims=True)
    shares = np.divide(matrix, totals, out=np.zeros(matrix.shape), where=totals != 0)
    panel.imshow(shares, vmin=0, vmax=1, cmap="Blues")
    panel.set_title(title)
    panel.set_xlabel("prediction")
    panel.set_ylabel("label")
    if max(matrix.shape) <= _MOST_COUNTED:
        for (row, column), value in np.ndenumerate(matrix):
            dark = shares[row, column] > 0.5
            panel.text(column, row, f"{value:g}", ha="center", va="center", color="white" if dark else "black")
    return png(figure)
