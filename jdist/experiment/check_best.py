"""Whether a task's evaluation measures what a config asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jdist.experiment.config import Config
from jdist.experiment.load import Document
from jdist.experiment.names import nearest
from jdist.experiment.validate import Problem, refusal, show
from jdist.loop.metric_totals import MetricTotals
from jdist.loop.task import Task
from jdist.metrics import Metric

PyTree = Any


def check_best(config: Config, measured: Mapping[str, Any], document: Document) -> None:
    """Refuse a `checkpoint.best` that the task does not measure, or of which there is no better and worse.

    Args:
        config: the checked config.
        measured: the results of an evaluation by name, or their shapes.
        document: what the config was read from.

    Raises:
        ConfigError: it names none of them, or an array.
    """
    best = config.checkpoint.best
    if best is None:
        return
    text, names = "", [name for name, value in measured.items() if np.ndim(value) == 0]
    if best not in measured:
        text = f"the task's evaluation has no metric {show(best)}"
    elif best not in names:
        text = f"{show(best)} is an array of shape {np.shape(measured[best])}, of which none is the best"
    if text:
        raise refusal(
            document, [Problem(key=("checkpoint", "best"), text=text, remedy=nearest(best, names, label="It has"))]
        )


def check_best_of_shapes(config: Config, task: Task, shapes: PyTree, document: Document) -> None:
    """As `check_best`, before there are any results.

    Args:
        config: the checked config.
        task: whose evaluation it is.
        shapes: of what its evaluation step returns.
        document: what the config was read from.

    Raises:
        ConfigError: `checkpoint.best` can be none of the results.
        StepError: the step returns what is no measurement.
    """
    noted = MetricTotals(task.metrics).note(shapes)
    if isinstance(task.metrics, Metric):
        return  # what it calls its results it says once there are some
    contributed = task.metrics or {}
    names = {name: 0.0 if name in contributed else shape for name, shape in noted.items()}
    best = config.checkpoint.best
    if best is not None and best.partition("/")[0] in contributed:  # a collection has several
        names[best] = 0.0
    check_best(config, names, document)
