"""`callbacks` of a config -> the callbacks of its run; whether the metrics that it names are measured."""

from __future__ import annotations

import inspect
import re
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
from jdist.support.signature import Key, Problem, check_options, misfit, show
from jdist.support.words import nearest
from jdist.typing import PyTree

# Of `jdist.callbacks`: a run has its own of these, or they take what no config can say.
_NOT_IN_CONFIGS = ("checkpoint", "progress", "jsonl", "track")
_IN_FOLDER = ("path", "folder", "dir")  # arguments that are relative to the run folder


def _factories() -> dict[str, Callable[..., Callback]]:
    """Lists the functions that make a callback by the names that configs have for them."""
    public = {name: value for name, value in vars(callbacks).items() if inspect.isfunction(value)}
    return {name: value for name, value in public.items() if name not in _NOT_IN_CONFIGS and name[0] != "_"}


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
    # Trackers, which show the config, connect to something when they are made; others are tried out.
    factories = _factories()
    for i, section in enumerate(config.callbacks):
        for name, options in section.items():
            key = ("callbacks", str(i), name)
            if name not in factories:
                yield Problem(key=key, text="no such callback", remedy=nearest(name, factories, label="Callbacks"))
                continue
            of_run = _of_run(name, "", 0.0)
            arguments = of_run | _given(options, of_run)
            problems = list(check_options(factories[name], arguments, called=name, key=key, wrong=_misfit, lists=True))
            if not problems and "config" not in inspect.signature(factories[name]).parameters:
                _, problems = _made(factories[name], arguments, key)
            yield from problems


def _misfit(value: Any, parameter: inspect.Parameter, key: Key) -> Problem | None:
    """Finds why a value misfits a parameter, such as blank text for one that has other text, a path or a name."""
    problem = misfit(value, parameter, key)
    if problem is None and isinstance(value, str) and not value.strip() and parameter.default is not None:
        return Problem(key=key, text=f"{show(value)} is not at least 1 visible character long")
    return problem


def _made(
    factory: Callable[..., Callback], arguments: Mapping[str, Any], key: Key
) -> tuple[list[Callback], list[Problem]]:
    """Makes a callback; returns it, or what is wrong, with the option where the error names one."""
    lists = [n for n, p in inspect.signature(factory).parameters.items() if p.kind is p.VAR_POSITIONAL]
    several = [item for n in lists for item in arguments.get(n, ())]
    try:
        return [factory(*several, **{n: value for n, value in arguments.items() if n not in lists})], []
    except (ConfigError, StepError) as exc:
        text = str(exc).removeprefix(f"{key[-1]}: ")
        option = re.match(r"(?:track: )?`(\w+)` is ", text)
        return [], [Problem(key=(*key, option[1]) if option else key, text=text)]


def make_callbacks(
    config: Config, values: Mapping[str, Any], learning_rate: Any, document: Document, folder: Path
) -> list[Callback]:
    """Makes the callbacks that a checked config names; trackers show its `values`."""
    made, problems = [], []
    for i, section in enumerate(config.callbacks):
        for name, options in section.items():
            key = ("callbacks", str(i), name)
            factory = _factories()[name]
            of_run = _of_run(name, config.name, learning_rate)
            arguments = of_run | _given(options, of_run)
            arguments |= {n: str(folder / arguments[n]) for n in _IN_FOLDER if n in arguments}
            if "config" in inspect.signature(factory).parameters:
                arguments["config"] = {**values, **(options.get("config") or {})}
            if arguments.get("schedule", ...) is None:
                text = "train.optimizer has no `learning_rate` to log"
                problems.append(Problem(key=key, text=text))
                continue
            callback, wrong = _made(factory, arguments, key)
            made += callback
            problems += wrong
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
    """Returns whether anything looks at a metric of the evaluation."""
    return any(_watched(config, made))


def _watched(config: Config, made: Sequence[Callback]) -> Iterator[tuple[Key, str]]:
    """Lists the evaluation's metrics that are looked at, by the key of what looks at them."""
    if config.checkpoint.best is not None:
        yield ("checkpoint", "best"), config.checkpoint.best
    for i, (callback, section) in enumerate(zip(made, complete(config).callbacks, strict=True)):
        for metric in callback.watches:
            if metric.startswith("eval/"):
                options = next(iter(section.values()))
                named = [option for option, value in options.items() if value == metric or value == [*callback.watches]]
                yield ("callbacks", str(i), callback.name, *named[:1]), metric
