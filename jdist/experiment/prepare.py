"""A checked config -> the things a run is made of; all wrong names and options are reported together."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax

from jdist.data.source import RandomAccessSource, resumable
from jdist.errors import ConfigError, DeviceError, StrategyError
from jdist.experiment.config import Config, TaskSection
from jdist.experiment.load import Document, Key
from jdist.experiment.names import nearest
from jdist.experiment.optimizer import KEY, build_optimizer, check_optimizer, fill_lengths
from jdist.experiment.options import check_options
from jdist.experiment.platform import check_devices
from jdist.experiment.validate import Problem, refusal, show
from jdist.strategies.by_name import STRATEGIES, make_strategy
from jdist.strategy import Strategy
from jdist.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of.

    Attributes:
        task: model, loss and data.
        strategy: where it runs.
        optimizer: the optax optimizer.
        train_data: the training source, a `RandomAccessSource` that lasts for the whole run.
        total_steps: steps of the whole run.
        steps_per_epoch: steps of one pass over the data; None if the data has no end.
        rows_per_epoch: rows of one pass; None if the data has no end.
        values: the whole config as plain values, with lengths of schedules filled in.
        derived: where values came from that were worked out, by key.
    """

    task: Task
    strategy: Strategy
    optimizer: optax.GradientTransformation
    train_data: Any
    total_steps: int
    steps_per_epoch: int | None
    rows_per_epoch: int | None
    values: dict[str, Any]
    derived: Mapping[Key, str]

    def examples(self, step: int, global_batch: int) -> int:
        """Rows seen after `step` steps; the short last batch of each epoch counts what it has."""
        if self.steps_per_epoch is None or self.rows_per_epoch is None:
            return step * global_batch
        epochs, within = divmod(step, self.steps_per_epoch)
        return epochs * self.rows_per_epoch + within * global_batch


def prepare(config: Config, document: Document, *, make: Callable[..., Strategy] = make_strategy) -> Parts:
    """Make what a config names.

    Args:
        config: the checked config.
        document: what it was read from, for the origins in messages.
        make: builds the strategy from its name and options.

    Returns:
        The parts of the run.

    Raises:
        ConfigError: one line for each name, option or number that does not fit.
        DeviceError: JAX finds no devices at all.
        DatasetError: the task's training data is empty or cannot be resumed.
    """
    check_devices()
    values = config.model_dump()
    problems: list[Problem] = []
    task = strategy = None
    try:
        task = _load_task(config.task, problems)
    except ConfigError as exc:
        problems.append(Problem(key=("task", "make"), text=str(exc)))
    name, options = config.strategy.name, {k: v for k, v in values["strategy"].items() if k != "name"}
    wrong = list(_check_strategy(name, options))
    problems += wrong
    if not wrong:
        try:
            strategy = make(name, **options)
        except (StrategyError, DeviceError) as exc:
            problems.append(Problem(key=("strategy", *options)[:2], text=str(exc).rstrip(".")))
    train, one_epoch, steps = config.train, None, config.train.steps
    if task is not None:
        one_epoch = resumable(task.train_data(train.global_batch, train.seed, 1))
        if steps is None and one_epoch.num_steps is None:
            problems.append(
                Problem(
                    key=("train", "epochs"),
                    text="the training data has no end, so it has no epochs",
                    remedy=" Say train.steps instead.",
                )
            )
        elif steps is None and train.epochs is not None and one_epoch.num_steps is not None:
            steps = train.epochs * one_epoch.num_steps
    if strategy is not None and -(-train.global_batch // strategy.num_replicas) % train.accumulate:
        rows = -(-train.global_batch // strategy.num_replicas)
        text = f"a replica's {rows:,} rows cannot be worked through in {train.accumulate:,} equal parts"
        problems.append(Problem(key=("train", "accumulate"), text=text))
    if steps is not None and steps % train.steps_per_call:
        problems.append(
            Problem(
                key=("train", "steps_per_call"),
                text=f"{train.steps_per_call} does not divide the {steps:,} steps of the run",
            )
        )
    train_data = None if task is None else resumable(task.train_data(train.global_batch, train.seed, None))
    if train_data is not None and steps is not None and (train_data.num_steps or steps) < steps:
        problems.append(
            Problem(
                key=("train", "steps" if train.steps else "epochs"),
                text=f"the training data ends after {train_data.num_steps:,} of {steps:,} steps",
                remedy=" A task's train_data(global_batch, seed, epochs=None) is to repeat without end.",
            )
        )
    section = fill_lengths(values["train"]["optimizer"], steps=steps or 1)
    problems += check_optimizer(section)
    if problems or task is None or strategy is None or steps is None or one_epoch is None:
        raise refusal(document, problems)
    derived = {
        (*KEY, option, name): f"the run's {steps} steps"
        for option, value in section.items()
        if isinstance(value, Mapping)
        for name in value.keys() - values["train"]["optimizer"][option].keys()
    }
    values["train"]["optimizer"] = section
    return Parts(
        task=task,
        strategy=strategy,
        optimizer=build_optimizer(section, clip_norm=train.clip_norm),
        train_data=train_data,
        total_steps=steps,
        steps_per_epoch=one_epoch.num_steps,
        rows_per_epoch=_rows(one_epoch),
        values=values,
        derived=derived,
    )


def _check_strategy(name: str, options: Mapping[str, Any]) -> Iterator[Problem]:
    """Unknown names of a strategy or of its options."""
    if name not in STRATEGIES:
        remedy = nearest(name, STRATEGIES, label="Strategies")
        yield Problem(key=("strategy", "name"), text=f"no strategy {show(name)}", remedy=remedy)
        return
    yield from check_options(STRATEGIES[name], options, called=f"strategy {name}", key=("strategy",))


def _rows(source: RandomAccessSource) -> int | None:
    """Rows of a source in which all batches but the last are full."""
    if source.num_steps is None:
        return None
    last = jax.tree.leaves(source.batch_at(source.num_steps - 1))[0]
    return (source.num_steps - 1) * source.global_batch + len(last)


def _load_task(section: TaskSection, problems: list[Problem]) -> Task | None:
    """Import and call `task.make`; what is wrong with its options is appended to `problems`."""
    module_name, _, function_name = section.make.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
        function = vars(module).get(function_name)
        if not callable(function):
            functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            remedy = nearest(function_name, functions, label="Its functions")
            raise ConfigError(f"{module_name} has no function {function_name!r}.{remedy}".rstrip("."))
        found = list(check_options(function, section.options, called=section.make, key=("task", "options")))
        problems += found
        if found:
            return None
        task = function(**section.options)
    except ModuleNotFoundError as exc:
        raise ConfigError(_not_found(module_name, exc.name or str(exc))) from exc
    if not isinstance(task, Task):
        raise ConfigError(f"{section.make} returned {show(type(task).__name__)}, not a jdist.tasks.Task")
    return task


def _not_found(wanted: str, missing: str) -> str:
    if wanted == missing or wanted.startswith(f"{missing}."):
        return f"no module {missing!r}; it must be installed, or lie in the current folder {os.getcwd()}"
    install = "'jdist[examples]'" if missing.partition(".")[0] in ("sklearn", "matplotlib") else missing
    return f"{wanted} needs the module {missing!r}, which is not installed: pip install {install}"
