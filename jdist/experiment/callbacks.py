"""`callbacks` of a config -> the callbacks of its run; whether the metrics that it names are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jdist import callbacks
from jdist.callbacks import Callback
from jdist.errors import ConfigError, StepError
from jdist.experiment.config import Config, EarlyStoppingOptions
from jdist.experiment.load import Document, Key
from jdist.experiment.prepare import Parts
from jdist.experiment.validate import Problem, best_as_written, refusal, show
from jdist.loop.metric_totals import MetricTotals
from jdist.loop.task import Task
from jdist.metrics import Metric
from jdist.support.suggest import nearest

PyTree = Any


def make_callbacks(config: Config, parts: Parts, document: Document, folder: Path) -> list[Callback]:
    """Makes the callbacks that a config names; relative paths are in the run folder."""
    callbacks_of_run, problems = [], []
    for i, section in enumerate(config.callbacks):
        options = section.options.model_dump()
        try:
            if section.name in _TRACKERS:
                options["config"] = {**parts.values, **(options.get("config") or {})}
            callbacks_of_run.append(_MAKE[section.name](options, parts, folder))
        except (ConfigError, StepError) as exc:
            text = str(exc).removeprefix(f"{section.name}: ")
            problems.append(Problem(key=("callbacks", str(i), section.name), text=text))
    if problems:
        raise refusal(document, problems)
    return callbacks_of_run


def _learning_rate_log(options: dict[str, Any], parts: Parts, _: Path) -> Callback:
    if parts.learning_rate is None:
        raise ConfigError("train.optimizer has no `learning_rate`, so there is none to log")
    return callbacks.learning_rate_log(parts.learning_rate, **options)


def _wandb(options: dict[str, Any], parts: Parts, folder: Path) -> Callback:
    run: dict[str, Any] = {
        "dir": str(folder / options.get("dir", "")),
        "name": options.get("name", parts.values["name"]),
    }
    return callbacks.wandb(**{**options, **run})


_TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")  # they show the config
_MAKE: dict[str, Callable[[dict[str, Any], Parts, Path], Callback]] = {
    "early_stopping": lambda options, parts, folder: callbacks.early_stopping(**options),
    "ema": lambda options, parts, folder: callbacks.ema(**options),
    "learning_rate_log": _learning_rate_log,
    "nan_guard": lambda options, parts, folder: callbacks.nan_guard(*options["metrics"]),
    "csv": lambda options, parts, folder: callbacks.csv(folder / options["path"]),
    "tensorboard": lambda options, parts, folder: callbacks.tensorboard(folder / options.pop("folder"), **options),
    "wandb": _wandb,
    "mlflow": lambda options, parts, folder: callbacks.mlflow(
        **options | {"run_name": options["run_name"] or parts.values["name"]}
    ),
    "trackio": lambda options, parts, folder: callbacks.trackio(**{"name": parts.values["name"]} | options),
    "profiler": lambda options, parts, folder: callbacks.profiler(folder / options.pop("folder"), **options),
}


def check_watched(config: Config, measured: Mapping[str, Any], document: Document) -> None:
    """Refuses to watch a metric that the task's evaluation does not measure, or an array."""
    # `measured` has the results by name without "eval/", or their shapes.
    problems = []
    for key, metric in _watched(config, document):
        name = metric.removeprefix("eval/")
        names = ["eval/" + each for each, value in measured.items() if np.ndim(value) == 0]
        remedy = nearest(f"eval/{name}", names, label="It has")
        if name not in measured:
            text = f"the task's evaluation has no metric {show(metric)}"
        elif f"eval/{name}" not in names:
            text = f"{show(metric)} is an array of shape {np.shape(measured[name])}, of which none is the best"
            remedy = f" It has: {', '.join(sorted(names))}."
        else:
            continue
        problems.append(Problem(key=key, text=text, remedy=remedy))
    if problems:
        raise refusal(document, problems)


def check_watched_of_shapes(config: Config, task: Task, shapes: PyTree, document: Document) -> None:
    """Checks as `check_watched` does, by the shapes of the evaluation step's results."""
    returned = MetricTotals(task.metrics).note(shapes)
    if isinstance(task.metrics, Metric):
        return  # it names its results once there are some
    contributed = task.metrics or {}
    names = {name: 0.0 if name in contributed else shape for name, shape in returned.items()}
    for _, metric in _watched(config, document):
        name = metric.removeprefix("eval/")
        if name.partition("/")[0] in contributed:  # a collection has several
            names[name] = 0.0
    check_watched(config, names, document)


def watches_evaluation(config: Config, document: Document) -> bool:
    """Whether anything looks at a metric of the evaluation."""
    return any(_watched(config, document))


def _watched(config: Config, document: Document) -> Iterator[tuple[Key, str]]:
    """Lists the evaluation's metrics that are looked at, by the key that names them."""
    best = best_as_written(document)
    if best is not None:
        yield ("checkpoint", "best"), best
    for i, section in enumerate(config.callbacks):
        options = section.options
        if isinstance(options, EarlyStoppingOptions) and options.metric.startswith("eval/"):
            yield ("callbacks", str(i), section.name, "metric"), options.metric
