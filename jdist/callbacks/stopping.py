"""Early ends of a run: a metric that no longer improves, or one that is not finite."""

from __future__ import annotations

import math
from typing import Literal

from jdist.callbacks.callback import Callback, Moment, Stop
from jdist.errors import StepError
from jdist.loop.report.metrics_file import COSTS, NAMES, OF_ROWS, Mode, better
from jdist.support import checks
from jdist.support.tensorflow_names import without_tensorflow_keywords
from jdist.support.words import closest, did_you_mean


@without_tensorflow_keywords
def early_stopping(
    metric: str = "eval/loss", *, patience: int = 3, min_delta: float = 0.0, mode: Literal["min", "max"] | None = None
) -> Callback:
    """Stops training when a metric has not improved for a while.

    It is a function of the history alone, so a run that was resumed stops where it would have stopped.

    Args:
        metric: "eval/NAME" looks at each evaluation, "epoch/NAME" at each epoch.
        patience: how many of these may pass without improvement before the run ends.
        min_delta: the least change that is an improvement, in the metric's unit.
        mode: whether less ("min") or more ("max") is better; None: as the name says ("loss", "error", "accuracy", "auc", ...).
            NaN is never better.

    Raises:
        StepError: an argument is not allowed; while training: the metric was not measured.

    Example:
        >>> import jdist
        >>> callbacks = [jdist.callbacks.early_stopping("eval/accuracy", patience=5)]

    Source: `tf.keras.callbacks.EarlyStopping`
    """
    checks.whole_number("patience", patience, StepError, call="early_stopping")
    checks.real_number("min_delta", min_delta, StepError, least=0, call="early_stopping")
    check_evaluated("early_stopping", "metric", metric, ("eval/", "epoch/"))
    sign = 1.0 if mode_of("early_stopping", metric, mode) == "min" else -1.0

    def look(moment: Moment) -> Stop | None:
        if moment.event != "start":
            value_of("early_stopping", metric, moment)
        best, waited = float("inf"), 0
        _, values = moment.history[metric]
        for value in sign * values:
            is_better = value < best - float(min_delta)
            best, waited = (value, 0) if is_better else (best, waited + 1)
        if waited < patience:
            return None
        return Stop(f"{metric} has not improved on {sign * best:.6g} for {waited} {metric.partition('/')[0]}s")

    def on_start(moment: Moment) -> Stop | None:
        is_over = metric in (moment.history.rows[-1] if moment.history.rows else {})
        return look(moment) if is_over else None  # a run that had ended by it, and is started again

    is_eval = metric.startswith("eval/")
    return Callback(
        on_start=on_start,
        on_eval=look if is_eval else None,
        on_epoch=None if is_eval else look,
        name="early_stopping",
        watches=(metric,),
        logs=(),
    )


def nan_guard(*metrics: str) -> Callback:
    """Stops training when a logged metric is NaN or infinite.

    Gradients that are not finite are the step's own affair: `jdist.distribute(..., non_finite="raise")`, the default, keeps
    the state as it was before. This is for what shows in metrics alone, or where steps are skipped or let through.

    Args:
        *metrics: names in a row, such as "loss" or "eval/loss"; none: all.

    Raises:
        StepError: a name is not text.
    """
    for name in metrics:
        if not isinstance(name, str):
            raise StepError(f'nan_guard: {name!r:.80} is not a metric name; give names, such as nan_guard("loss").')

    def on_row(moment: Moment) -> Stop | None:
        for name, value in (moment.row or {}).items():
            if (not metrics or name in metrics) and isinstance(value, float) and not math.isfinite(value):
                return Stop(f"{name} is {value} at step {moment.step:,}")
        return None

    return Callback(on_row=on_row, name="nan_guard", watches=metrics, logs=())


def mode_of(callback: str, metric: str, mode: str | None) -> Mode:
    """Finds whether less or more of a metric is better: by `mode`, else by its name."""
    if mode is not None:
        return checks.choice("mode", mode, ("min", "max"), StepError, call=callback)
    by_name = better(metric)
    if by_name is None:
        kind, _, name = metric.rpartition("/")
        near = closest(name.lower(), NAMES, cutoff=0.75)
        raise StepError(
            f"{callback}: cannot tell from the name {metric!r} whether higher is better; set mode='min' or mode='max', "
            f"or correct the name.{f' Did you mean {kind}/{near}?' if near else ''}"
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
    """Raises a `StepError` for a metric without one of the prefixes, such as Keras' "val_loss"."""
    if not isinstance(metric, str) or not metric.startswith(prefixes):
        allowed = " or ".join(map(repr, prefixes))
        name = metric.removeprefix("epoch/").removeprefix("val_") if isinstance(metric, str) else "loss"
        raise StepError(
            f"{callback}: `{argument}` is {metric!r:.80}; it must begin with {allowed}. Did you mean {f'eval/{name}'!r}?"
        )
