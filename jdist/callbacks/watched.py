"""A metric that a callback looks at, by its name in a row."""

from __future__ import annotations

from jdist.callbacks.callback import Moment
from jdist.errors import StepError
from jdist.near import did_you_mean


def value_of(callback: str, metric: str, moment: Moment) -> float:
    """The value that this moment's row has of a metric.

    Args:
        callback: who asks, for errors.
        metric: its name in the row, such as "eval/loss".
        moment: of an evaluation, an epoch or a row.

    Raises:
        StepError: it was not measured, or is no single number.
    """
    row = moment.row or {}
    if metric not in row:
        names = [name for name in row if name not in ("step", "epoch", "time_s")]
        raise StepError(
            f"{callback}: {metric!r} was not measured; there are {', '.join(map(repr, names)) or 'none'}."
            f"{did_you_mean(metric, names)}"
        )
    if not isinstance(row[metric], int | float):
        raise StepError(f"{callback}: {metric!r} is a {type(row[metric]).__name__}; it must be one number.")
    return float(row[metric])
