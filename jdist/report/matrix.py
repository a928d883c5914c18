"""Pictures of matrices: a confusion matrix with its counts."""

from __future__ import annotations

import numpy as np

from jdist.report.curves import new_figure, png

_MOST_COUNTED = 20  # rows with a number in each cell; of more the colours alone can be read


def matrix_as_png(matrix: np.ndarray, *, title: str) -> bytes | None:
    """Draws a [labels, predictions] matrix as a PNG, shaded by row; None without matplotlib."""
    # Numbers, none below 0, are written into the cells of up to 20 rows.
    figure = new_figure(1)
    if figure is None:
        return None
    figure.figure.set_size_inches(5, 5)
    panel = figure.panels[0]
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
