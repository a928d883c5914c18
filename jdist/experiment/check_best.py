"""Whether a task's evaluation measures what a config asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jdist.experiment.config import Config, EarlyStoppingOptions
from jdist.experiment.load import Document, Key
from jdist.experiment.names import nearest
from jdist.experiment.validate import Problem, best_as_written, refusal, show
from jdist.loop.metric_totals import MetricTotals
from jdist.loop.task import Task
from jdist.metrics import Metric

PyTree = Any


def check_watched(config: Config, measured: Mapping[str, Any], document: Document) -> None:
    """Refuses to look at what the task's evaluation does not measure, or at an array, of which nothing is the best.

    Args:
        config: the checked config.
        measured: the results of an evaluation by name, or their shapes.
        document: what the config was read from.

    Raises:
        ConfigError: `checkpoint.best` or the metric of a callback is none of the numbers among them.
    """
    problems = []
    for key, metric in _watched(config, document):
        prefix = "eval/" if metric.startswith("eval/") else ""  # names are told as the config has them
        name = metric.removeprefix("eval/")
        names = [prefix + each for each, value in measured.items() if np.ndim(value) == 0]
        if name not in measured:
            text = f"the task's evaluation has no metric {show(metric)}"
        elif metric not in names:
            text = f"{show(metric)} is an array of shape {np.shape(measured[name])}, of which none is the best"
        else:
            continue
        problems.append(Problem(key=key, text=text, remedy=nearest(metric, names, label="It has")))
    if problems:
        raise refusal(document, problems)


def check_watched_of_shapes(config: Config, task: Task, shapes: PyTree, document: Document) -> None:
    """As `check_watched`, before there are any results.

    Args:
        config: the checked config.
        task: whose evaluation it is.
        shapes: of what its evaluation step returns.
        document: what the config was read from.

    Raises:
        ConfigError: what is looked at can be none of the results.
        StepError: the step returns what is no measurement.
    """
    noted = MetricTotals(task.metrics).note(shapes)
    if isinstance(task.metrics, Metric):
        return  # what it calls its results it says once there are some
    contributed = task.metrics or {}
    names = {name: 0.0 if name in contributed else shape for name, shape in noted.items()}
    for _, metric in _watched(config, document):
        name = metric.removeprefix("eval/")
        if name.partition("/")[0] in contributed:  # a collection has several
            names[name] = 0.0
    check_watched(config, names, document)


def watches_evaluation(config: Config) -> bool:
    """Whether anything looks at a metric of the evaluation."""
    return config.checkpoint.best is not None or any(_of_callbacks(config))


def _watched(config: Config, document: Document) -> Iterator[tuple[Key, str]]:
    """The evaluation's metrics that are looked at, by the key that names them."""
    best = best_as_written(document)
    if best is not None:
        yield ("checkpoint", "best"), best
    yield from _of_callbacks(config)


def _of_callbacks(config: Config) -> Iterator[tuple[Key, str]]:
    for i, section in enumerate(config.callbacks):
        options = section.options
        if isinstance(options, EarlyStoppingOptions) and options.metric.startswith("eval/"):
            yield ("callbacks", str(i), section.name, "metric"), options.metric
