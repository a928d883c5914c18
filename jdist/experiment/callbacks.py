"""`callbacks` of a config -> the callbacks of its run; whether the metrics that it names are measured."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jdist import callbacks
from jdist.callbacks import Callback
from jdist.errors import ConfigError, StepError
from jdist.experiment.config import Config
from jdist.experiment.load import Document
from jdist.experiment.validate import refusal
from jdist.loop.metric_totals import MetricTotals
from jdist.loop.task import Task
from jdist.metrics import Metric
from jdist.support.signature import Problem, check_options, show
from jdist.support.suggest import nearest
from jdist.typing import PyTree

# Of `jdist.callbacks`: a run has its own of these, or they take what no config can say.
_NOT_IN_CONFIGS = ("checkpoint", "progress", "jsonl", "track")
_IN_FOLDER = ("path", "folder", "dir")  # arguments that are relative to the run folder


def _factories() -> dict[str, Callable[..., Callback]]:
    """Lists the functions that make a callback by the names that configs have for them."""
    public = {name: value for name, value in vars(callbacks).items() if inspect.isfunction(value)}
    return {name: value for name, value in public.items() if name not in _NOT_IN_CONFIGS}


def _of_run(callback: str, run: str, learning_rate: Any) -> dict[str, Any]:
    """Lists the arguments that a run gives to a callback where its config does not, or says null."""
    return {
        "learning_rate_log": {"schedule": learning_rate},
        "csv": {"path": "metrics.csv"},
        "tensorboard": {"folder": "tensorboard"},
        "profiler": {"folder": "profile"},
        "wandb": {"name": run, "dir": ""},
        "mlflow": {"run_name": run},
        "trackio": {"name": run},
    }.get(callback, {})


def _given(options: Mapping[str, Any], of_run: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out options that are null where the run has a value for them."""
    return {name: value for name, value in options.items() if value is not None or name not in of_run}


def complete(config: Config) -> Config:
    """Fills in defaults of callbacks, so that a run's record says all that a later jdist may change."""
    sections = [
        {name: _defaults(name) | _given(options, _of_run(name, "", None)) for name, options in section.items()}
        for section in config.callbacks
    ]
    return config.model_copy(update={"callbacks": sections})


def _defaults(callback: str) -> dict[str, Any]:
    """Lists the defaults of a callback's options that are plain values; those that depend on the run are not."""
    factory = _factories().get(callback)
    parameters = inspect.signature(factory).parameters.values() if factory else ()
    plain = {p.name: p.default for p in parameters if isinstance(p.default, bool | int | float | str | None)}
    lists: dict[str, Any] = {p.name: [] for p in parameters if p.kind is p.VAR_POSITIONAL}
    return plain | lists | {name: value for name, value in _of_run(callback, "", None).items() if value}


def check_callbacks(config: Config) -> Iterator[Problem]:
    """Yields a problem for each unknown callback, and each option that its function does not take."""
    factories = _factories()
    for i, section in enumerate(config.callbacks):
        for name, options in section.items():
            key = ("callbacks", str(i), name)
            if name in factories:
                of_run = _of_run(name, "", 0.0)
                arguments = of_run | _given(options, of_run)
                yield from check_options(factories[name], arguments, called=name, key=key, lists=True)
            else:
                yield Problem(key=key, text="no such callback", remedy=nearest(name, factories, label="Callbacks"))


def make_callbacks(
    config: Config, values: Mapping[str, Any], learning_rate: Any, document: Document, folder: Path
) -> list[Callback]:
    """Makes the callbacks that a checked config names; trackers show its `values`."""
    made, problems = [], []
    for i, section in enumerate(config.callbacks):
        for name, options in section.items():
            factory = _factories()[name]
            parameters = inspect.signature(factory).parameters
            of_run = _of_run(name, config.name, learning_rate)
            arguments = of_run | _given(options, of_run)
            arguments |= {n: str(folder / arguments[n]) for n in _IN_FOLDER if n in arguments}
            if "config" in parameters:
                arguments["config"] = {**values, **(options.get("config") or {})}
            several = [arguments.pop(n, ()) for n, p in parameters.items() if p.kind is p.VAR_POSITIONAL]
            try:
                if arguments.get("schedule", ...) is None:
                    raise ConfigError("train.optimizer has no `learning_rate`, so there is none to log")
                made.append(factory(*(item for items in several for item in items), **arguments))
            except (ConfigError, StepError) as exc:
                text = str(exc).removeprefix(f"{name}: ")
                problems.append(Problem(key=("callbacks", str(i), name), text=text))
    if problems:
        raise refusal(document, problems)
    return made


def check_watched(config: Config, made: Sequence[Callback], measured: Mapping[str, Any], document: Document) -> None:
    """Refuses to watch a metric that the task's evaluation does not measure, or an array."""
    # `measured` has the results by name without "eval/", or their shapes.
    names = ["eval/" + each for each, value in measured.items() if np.ndim(value) == 0]
    problems = []
    for key, metric in _watched(config, made):
        name = metric.removeprefix("eval/")
        if name not in measured:
            text, remedy = f"the task's evaluation has no metric {show(metric)}", nearest(metric, names, label="It has")
        elif metric not in names:
            text = f"{show(metric)} is an array of shape {np.shape(measured[name])}, and not one number"
            remedy = f" It has: {', '.join(sorted(names))}."
        else:
            continue
        problems.append(Problem(key=key, text=text, remedy=remedy))
    if problems:
        raise refusal(document, problems)


def check_watched_of_shapes(
    config: Config, made: Sequence[Callback], task: Task, shapes: PyTree, document: Document
) -> None:
    """Checks as `check_watched` does, by the shapes of the evaluation step's results."""
    returned = MetricTotals(task.metrics).note(shapes)
    if isinstance(task.metrics, Metric):
        return  # it names its results once there are some
    contributed = task.metrics or {}
    names = {name: 0.0 if name in contributed else shape for name, shape in returned.items()}
    for _, metric in _watched(config, made):
        name = metric.removeprefix("eval/")
        if name.partition("/")[0] in contributed:  # a collection has several
            names[name] = 0.0
    check_watched(config, made, names, document)


def watches_evaluation(config: Config, made: Sequence[Callback]) -> bool:
    """Whether anything looks at a metric of the evaluation."""
    return any(_watched(config, made))


def _watched(config: Config, made: Sequence[Callback]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Lists the evaluation's metrics that are looked at, by the key of what looks at them."""
    if config.checkpoint.best is not None:
        yield ("checkpoint", "best"), config.checkpoint.best
    for i, callback in enumerate(made):
        yield from (
            (("callbacks", str(i), callback.name), metric) for metric in callback.watches if metric.startswith("eval/")
        )
