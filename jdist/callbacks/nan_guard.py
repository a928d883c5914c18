"""Ending a run whose metrics are no numbers any more."""

from __future__ import annotations

import math

from jdist.callbacks.callback import Callback, Moment, Stop
from jdist.errors import StepError


def nan_guard(*metrics: str) -> Callback:
    """Stops training when a logged metric is NaN or infinite.

    Gradients that are not finite are the step's own affair: `jdist.distribute(..., non_finite="raise")`, the default, keeps
    the state as it was before. This is for what shows in metrics alone, or where steps are skipped or let through.

    Args:
        *metrics: names in a row, such as "loss" or "eval/loss"; none: all.

    Returns:
        The callback.

    Raises:
        StepError: a name is no text.
    """
    for name in metrics:
        if not isinstance(name, str):
            raise StepError(f'nan_guard: {name!r:.80} is no name of a metric; give names, such as nan_guard("loss").')

    def on_row(moment: Moment) -> Stop | None:
        for name, value in (moment.row or {}).items():
            if (not metrics or name in metrics) and isinstance(value, float) and not math.isfinite(value):
                return Stop(f"{name} is {value} at step {moment.step:,}")
        return None

    return Callback(on_row=on_row, name="nan_guard", watches=metrics, logs=())
