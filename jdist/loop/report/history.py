"""The history of a training run, which plots itself."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jdist.errors import ConfigError
from jdist.loop.report.curves import NO_MATPLOTLIB, as_png, new_figure
from jdist.loop.report.files import write_atomically
from jdist.loop.report.metrics_file import COSTS, EPOCH, EVAL, OF_ROWS
from jdist.support.table import paragraph
from jdist.support.words import did_you_mean


@dataclass(eq=False)
class History:
    """The rows that a run has logged.

    Attributes:
        rows: dicts, "step" and "epoch" first, then metrics: "loss" of one step, "epoch/loss" over an epoch, "eval/loss" of an
            evaluation.
        stopped: why the run ended before its time; None if it did not.
        steps: steps made, which may be more than the last row's; None: as many as the rows say.

    Example:
        >>> history = History([{"step": 1, "epoch": 0, "loss": 2.0}, {"step": 2, "epoch": 1, "loss": 1.0, "eval/loss": 1.5}])
        >>> steps, losses = history["loss"]
        >>> losses.tolist(), history.evals
        ([2.0, 1.0], [{'step': 2, 'epoch': 1, 'loss': 1.5}])
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    stopped: str | None = None
    steps: int | None = None

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """Means and metrics of each epoch, over all its rows, with "step" and "epoch"."""
        return self._of(EPOCH)

    @property
    def evals(self) -> list[dict[str, Any]]:
        """Results of each evaluation, with "step" and "epoch"."""
        return self._of(EVAL)

    def __getitem__(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Lists the steps at which a metric was measured, and its values.

        Args:
            name: such as "loss", "epoch/loss" or "eval/loss".

        Raises:
            KeyError: nothing of that name was measured.
        """
        points = [(row["step"], row[name]) for row in self.rows if name in row]
        if not points:
            names = sorted({key for row in self.rows for key in row if key not in OF_ROWS + COSTS})
            raise KeyError(
                f"{name!r} was not measured; there are {', '.join(names) or 'no rows'}.{did_you_mean(name, names)}"
            )
        steps, values = zip(*points, strict=True)
        return np.array(steps), np.array(values)

    def plot(self, path: str | os.PathLike[str], *, title: str = "") -> None:
        """Draws the curves into a PNG file. In a notebook a history shows them by itself.

        Args:
            path: the file, replaced as a whole.
            title: heading.

        Raises:
            ConfigError: nothing was measured, matplotlib is not installed, or the file cannot be written.
        """
        picture = as_png(self.rows, title=title)
        if isinstance(picture, str):
            raise ConfigError(f"{os.fspath(path)}: {picture}")
        write_atomically(Path(path), picture)

    def _repr_png_(self) -> bytes | None:
        picture = as_png(self.rows, title="")
        return None if isinstance(picture, str) else picture

    def _repr_html_(self) -> str | None:
        if new_figure(1) is not None:
            return None  # where there is HTML, a notebook would not show the picture
        return paragraph(repr(self), NO_MATPLOTLIB)

    def _of(self, prefix: str) -> list[dict[str, Any]]:
        rows = []
        for row in self.rows:
            values = {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}
            if values:
                rows.append({"step": row["step"], "epoch": row["epoch"]} | values)
        return rows

    def __repr__(self) -> str:
        logged = self.rows[-1]["step"] if self.rows else 0
        steps = logged if self.steps is None else self.steps
        stopped = f", stopped: {self.stopped}" if self.stopped else ""
        return f"History({steps:,} steps, {len(self.rows):,} rows, {len(self.evals):,} evaluations{stopped})"
