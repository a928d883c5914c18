"""Metrics that callbacks look at, by their names in rows."""

from __future__ import annotations

from jdist.callbacks.callback import Moment
from jdist.errors import StepError
from jdist.report.metric_direction import Mode, better
from jdist.report.metrics_file import COSTS, OF_ROWS
from jdist.support.suggest import did_you_mean


def mode_of(callback: str, metric: str, mode: str | None) -> Mode:
    """Finds whether less or more of a metric is better: by `mode`, else by its name."""
    if mode in ("min", "max"):
        return mode
    if mode is not None:
        raise StepError(f"{callback}: `mode` is {mode!r}; it must be 'min' or 'max'.")
    by_name = better(metric)
    if by_name is None:
        raise StepError(
            f"{callback}: say whether less or more of {metric!r} is better: mode='min' or mode='max'. (A name such as "
            "'loss' or 'accuracy' says it: is this one misspelt?)"
        )
    return by_name


def value_of(callback: str, metric: str, moment: Moment) -> float:
    """Reads a metric from the row of an evaluation, an epoch or a logged step."""
    row = moment.row or {}
    if metric not in row:
        names = [name for name in row if name not in OF_ROWS + COSTS]
        raise StepError(
            f"{callback}: {metric!r} was not measured; there are {', '.join(map(repr, names)) or 'none'}."
            f"{did_you_mean(metric, names)}"
        )
    if not isinstance(row[metric], int | float):
        raise StepError(f"{callback}: {metric!r} is a {type(row[metric]).__name__}; it must be one number.")
    return float(row[metric])


def check_evaluated(callback: str, argument: str, metric: str, prefixes: tuple[str, ...]) -> None:
    """Raises a `StepError` for a metric whose name has none of the prefixes, as Keras' "val_loss"."""
    if not isinstance(metric, str) or not metric.startswith(prefixes):
        allowed = " or ".join(map(repr, prefixes))
        name = metric.removeprefix("epoch/").removeprefix("val_") if isinstance(metric, str) else "loss"
        raise StepError(
            f"{callback}: `{argument}` is {metric!r:.80}; it must begin with {allowed}. Did you mean {f'eval/{name}'!r}?"
        )
