"""Checks of a run against its traced steps, before anything is compiled."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jdist.callbacks.callback import Callback
from jdist.checkpoint import CheckpointWarning
from jdist.errors import StepError
from jdist.loop.data import Feed
from jdist.loop.metric_totals import Metrics, MetricTotals
from jdist.report.metrics_file import EPOCH, EVAL
from jdist.step.base import IGNORES_MASK, Distributed
from jdist.support.suggest import did_you_mean

PyTree = Any


def names_of(
    step: Distributed, state: PyTree, feed: Feed, metrics: Metrics, *, depth: int = 3
) -> frozenset[str] | None:
    """Lists the names of a step's metrics; None where only a call shows them."""
    # Warns of problems in the trace. `depth` counts the calls up to the user's own, for the
    # location of warnings.
    preview = step.preview(state, feed.batches.element_spec)
    if preview is None:
        return None
    if "metrics" not in preview.results:
        raise StepError(
            f'{step.__name__} returns the state alone. Let it return its metrics too: `return state, {{"loss": loss}}`.'
        )
    totals = MetricTotals(metrics, steps_per_call=step.options.steps_per_call)
    names = totals.names(preview.results["metrics"], by=step.__name__)
    if "state" in preview.results and not preview.changes_state:
        warnings.warn(
            f"{step.__name__} returns the state as it was given: nothing is learned. Return the new one: "
            "`return state.apply_gradients(grads=grads), metrics`.",
            stacklevel=depth + 1,
        )
    if feed.pads and preview.ignores_mask:
        warnings.warn(f"{step.__name__} {IGNORES_MASK}", stacklevel=depth + 1)
    return names


def check_returned(metrics: Metrics, trained: frozenset[str] | None, evaluated: frozenset[str] | None) -> None:
    """Raises a `StepError` for a metric of which no step returns a contribution; see `check_watched` for the names."""
    if not isinstance(metrics, Mapping) or trained is None or evaluated is None:
        return
    there = sorted(trained | evaluated)
    for name in metrics:
        if name not in there:
            raise StepError(
                f"`metrics` has {name!r}, which no step returns; they return {', '.join(map(repr, there))}."
                f"{did_you_mean(name, there)} Let one return `{{{name!r}: metric.update(...)}}`, or leave it out."
            )


def check_resumes(callbacks: Sequence[Callback], feed: Feed, *, depth: int) -> None:
    """Warns of what it costs to go on with a run on data that has no position, if a callback goes on with runs."""
    names = [callback.name for callback in callbacks if callback.on_resume is not None]
    if names and not feed.has_position:
        warnings.warn(
            f"{names[0]}: `data` is {feed.kind}, whose position cannot be saved: {feed.advice}. A run that goes on reads the "
            "pass again from its beginning, up to where it was, and leaves those batches out: that takes as long as reading "
            "them, and each row counts once only if they come in the same order as before.",
            CheckpointWarning,
            stacklevel=depth + 1,
        )


def check_watched(
    callbacks: Sequence[Callback],
    *,
    trained: frozenset[str] | None,
    evaluated: frozenset[str] | None,
    evaluates: bool,
) -> None:
    """Refuses callbacks that watch a metric that is never measured, or log another in its place; None: not known yet."""
    logged = _logged(callbacks)
    measured = {prefix + name for prefix in ("", EPOCH) for name in trained or ()}
    measured |= {EVAL + name for name in evaluated or ()}
    for callback in callbacks:
        for name in callback.logs or ():
            if name in measured:
                raise StepError(
                    f"{callback.name}: it logs {name!r}, which a step returns already. Choose another name."
                )
        for metric in callback.watches:
            is_eval = metric.startswith(EVAL)
            if is_eval and not evaluates:
                # Checkpoints go by an evaluation's metric alone.
                other = "" if callback.on_save is not None else ", or take a metric of training, such as 'epoch/loss'"
                raise StepError(
                    f"{callback.name}: {metric!r} is never measured, as this run does not evaluate. Give `eval_data` and "
                    f"`eval_step`{other}."
                )
            names = evaluated if is_eval else trained
            if names is None or logged is None or metric in logged:
                continue
            prefix = EVAL if is_eval else EPOCH if metric.startswith(EPOCH) else ""
            name = metric.removeprefix(prefix)
            if name not in names and name.partition("/")[0] not in names:
                there = sorted(prefix + each for each in names)
                raise StepError(
                    f"{callback.name}: {metric!r} will not be measured; there will be "
                    f"{', '.join(map(repr, there)) or 'none'}.{did_you_mean(metric, there)}"
                )


def _logged(callbacks: Sequence[Callback]) -> frozenset[str] | None:
    """Collects the names that callbacks add to a row before others read it; None: any."""
    names: set[str] = set()
    for callback in callbacks:
        functions = (callback.on_eval, callback.on_epoch, callback.on_step, callback.on_row)
        if any(function is not None for function in functions):
            if callback.logs is None:
                return None
            names.update(callback.logs)
    return frozenset(names)
