"""A checked config -> the parts of a run; all wrong names and options are reported together."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax

from jdist.core.precision import precision
from jdist.core.strategy import Strategy
from jdist.data.adapters.recognize import adapted
from jdist.data.sources.protocol import RandomAccessSource
from jdist.data.sources.rows import RowSource
from jdist.data.sources.sequential import SequentialSource, resumable
from jdist.errors import ConfigError, DeviceError, StrategyError
from jdist.experiment.callbacks import check_callbacks, complete
from jdist.experiment.config import Config, TaskSection, TrainSection
from jdist.experiment.load import Document
from jdist.experiment.optimizer import KEY, build_optimizer, check_optimizer, fill_lengths, learning_rate
from jdist.experiment.schedule import warn_beyond
from jdist.experiment.validate import refusal
from jdist.loop.task import Task
from jdist.step.decorator import distribute
from jdist.step.mesh_step import DistributedStep
from jdist.strategies.by_name import STRATEGIES, make_strategy
from jdist.strategies.devices import find_devices
from jdist.support.checks import largest_divisor
from jdist.support.signature import Key, Problem, check_options, leaves, show
from jdist.support.words import nearest
from jdist.tasks.options import OptionError, near
from jdist.typing import PyTree

_MAKE: Key = ("task", "make")
_OPTIONS: Key = ("task", "options")
_LONG = 10**9  # stands for the length of a run that is not known yet: enough for every schedule


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a run."""

    task: Task  # model, loss and data
    strategy: Strategy
    optimizer: optax.GradientTransformation
    learning_rate: Any  # of the optimizer, a number or a schedule; None if it has none
    train_data: Any  # a source that lasts for the whole run, or is gone through as often as that takes
    total_steps: int  # of the whole run
    steps_per_epoch: int | None  # of one pass over the data; None if that has no end
    rows_per_epoch: int | None  # also of one pass
    eval_batch: int  # rows of one evaluation step, at most those there are to evaluate on
    values: dict[str, Any]  # the whole config as plain values, with lengths of schedules filled in
    derived: Mapping[Key, str]  # where values came from that follow from others, by key

    def examples(self, step: int, global_batch: int) -> int:
        """Counts the rows of the first `step` steps; the short last batch of an epoch counts what it has."""
        if self.steps_per_epoch is None or self.rows_per_epoch is None:
            return step * global_batch
        epochs, within = divmod(step, self.steps_per_epoch)
        return epochs * self.rows_per_epoch + within * global_batch


def prepare(
    config: Config, document: Document, *, make: Callable[..., Strategy] = make_strategy, to_run: bool = True
) -> Parts:
    """Makes the objects of a config; without `to_run`, batches may be larger than the data."""
    try:
        return _parts(config, document, make=make, to_run=to_run)
    except OptionError as exc:  # of the task's data
        raise refusal(document, [_of_option(exc)]) from exc
    except OSError as exc:
        raise refusal(document, [_of_path(config.task, exc)]) from exc


def _parts(config: Config, document: Document, *, make: Callable[..., Strategy], to_run: bool) -> Parts:
    values = complete(config).model_dump()
    strategy = None
    name, options = config.strategy.name, config.strategy.model_extra or {}
    strategy_problems = list(_check_strategy(config))
    if any(check_callbacks(config)):  # said before processes meet, and before the task loads its data
        check_names(config, document)
    if name != "multi_worker":  # which has to find JAX unused: devices are counted when all processes are there
        find_devices(None)
    if not strategy_problems:
        try:
            strategy = make(name, **options)
        except (StrategyError, DeviceError) as exc:
            strategy_problems.append(Problem(key=("strategy", *options)[:2], text=str(exc)))
    task, problems = _make_task(config.task)
    problems += strategy_problems
    train, one_epoch, rows, epoch_steps, steps = config.train, None, None, None, config.train.steps
    length = ("train", "steps" if steps is not None else "epochs")
    if task is not None:
        one_epoch = _training_data(task, train, 1)
        rows, epoch_steps = _rows(one_epoch), one_epoch.num_steps
        if steps is None and epoch_steps is None:
            text = "does not tell how many batches it has, so the length of an epoch is not known"
            if isinstance(one_epoch, RandomAccessSource):
                text = "has no end, so it has no epochs"
            remedy = " Say train.steps instead."
            problems.append(Problem(key=("train", "epochs"), text=f"the training data {text}", remedy=remedy))
        elif steps is None and train.epochs is not None and epoch_steps is not None:
            steps = train.epochs * epoch_steps
    problems += _check_numbers(train, strategy, rows=rows if to_run else None, steps=steps)
    train_data = None if task is None else _training_data(task, train, None)
    if isinstance(train_data, RandomAccessSource) and steps is not None and (train_data.num_steps or steps) < steps:
        text = f"the training data ends after {train_data.num_steps:,} of {steps:,} steps"
        remedy = " A task's train_data(global_batch, seed, epochs=None) must repeat without end."
        problems.append(Problem(key=length, text=text, remedy=remedy))
    section, filled, optimizer_problems = _optimizer(values, steps=steps, length=length)
    problems += optimizer_problems
    if problems or task is None or strategy is None or steps is None or one_epoch is None:
        raise refusal(document, problems)
    values["train"]["optimizer"] = section
    return Parts(
        task=task,
        strategy=strategy,
        optimizer=build_optimizer(section, global_batch=train.global_batch, clip_norm=train.clip_norm),
        learning_rate=learning_rate(section, global_batch=train.global_batch),
        train_data=train_data,
        total_steps=steps,
        steps_per_epoch=epoch_steps,
        rows_per_epoch=rows,
        eval_batch=_eval_batch(task, config.eval.global_batch or train.global_batch),
        values=values,
        derived=dict.fromkeys(filled, f"the run's {steps} steps"),
    )


def check_names(config: Config, document: Document) -> None:
    """Refuses unknown names and options of strategy and optimizer, without devices and data."""
    *_, optimizer_problems = _optimizer(config.model_dump(), steps=config.train.steps, length=("train", "steps"))
    if problems := [*_check_strategy(config), *check_callbacks(config), *optimizer_problems]:
        raise refusal(document, problems)


def _optimizer(
    values: dict[str, Any], *, steps: int | None, length: Key
) -> tuple[dict[str, Any], set[Key], list[Problem]]:
    """Fills lengths of schedules in the optimizer's section; returns it, the keys filled in, and the problems with it."""
    optimizer = values["train"]["optimizer"]
    section = fill_lengths(optimizer, steps=steps or _LONG)
    filled = {(*KEY, *key) for key in dict(leaves(section)).keys() - dict(leaves(optimizer)).keys()}
    for option, value in optimizer.items() if steps is not None else ():
        warn_beyond(value, (*KEY, option), steps=steps or _LONG)
    global_batch = values["train"]["global_batch"]
    return section, filled, list(check_optimizer(section, global_batch=global_batch, filled=filled, length=length))


def _check_strategy(config: Config) -> Iterator[Problem]:
    """Yields a problem for an unknown strategy, or for each of its options that is not right."""
    name = config.strategy.name
    if name not in STRATEGIES:
        remedy = nearest(name, STRATEGIES, label="Strategies")
        yield Problem(key=("strategy", "name"), text=f"no strategy {show(name)}", remedy=remedy)
        return
    options = config.strategy.model_extra or {}
    yield from check_options(STRATEGIES[name], options, called=f"strategy {name}", key=("strategy",))


def _check_numbers(
    train: TrainSection, strategy: Strategy | None, *, rows: int | None, steps: int | None
) -> Iterator[Problem]:
    """Yields a problem for numbers of `train` that do not fit each other, or the data's rows or the run's steps where known."""
    if rows is not None and train.global_batch > 2 * rows:  # up to there a batch of all rows is filled up with padding
        yield Problem(
            key=("train", "global_batch"),
            text=f"{train.global_batch:,} is more than twice the {rows:,} rows that there are to train on: most of every "
            "step would be padding",
            remedy=f" For all rows in every step say {rows}.",
        )
    share = -(-train.global_batch // strategy.num_replicas) if strategy is not None else 0
    if share % train.accumulate and strategy is not None:
        replicas = strategy.num_replicas
        least = replicas * train.accumulate
        fits = -(-train.global_batch // least) * least
        yield Problem(
            key=("train", "accumulate"),
            text=f"a replica's {share:,} rows cannot be worked through in {train.accumulate:,} equal parts: train.global_batch "
            f"is {train.global_batch:,}, over {replicas:,} replica{'s' if replicas > 1 else ''}",
            remedy=f" Say train.global_batch={fits}, or train.accumulate={largest_divisor(share, train.accumulate)}.",
        )
    if steps is not None and steps % train.steps_per_call:
        text = f"{train.steps_per_call} does not divide the {steps:,} steps of the run"
        yield Problem(key=("train", "steps_per_call"), text=text)


def _training_data(task: Task, train: TrainSection, epochs: int | None) -> Any:
    """Asks a task for its training data; refuses data that cannot be resumed or iterated again."""
    source = adapted(task.train_data(train.global_batch, train.seed, epochs))
    return source if isinstance(source, SequentialSource) else resumable(source)


def _rows(source: Any) -> int | None:
    """Counts the rows of a source in which all batches but the last are full; None where that is not known."""
    if isinstance(source, RowSource):
        return source.num_rows if source.epochs == 1 and not source.drop_short and source.num_steps else None
    if not isinstance(source, RandomAccessSource) or not source.num_steps:
        return None
    last = jax.tree.leaves(source.batch_at(source.num_steps - 1))[0]
    return (source.num_steps - 1) * source.global_batch + len(last)


def _eval_batch(task: Task, global_batch: int) -> int:
    """Limits the rows of one evaluation step to those there are: the rest would be padding."""
    rows = _rows(adapted(task.eval_data(global_batch)))
    return global_batch if rows is None else min(global_batch, rows)


def _make_task(section: TaskSection) -> tuple[Task | None, list[Problem]]:
    """Imports and calls `task.make`; returns the task, or None and what is wrong."""
    try:
        function = import_function(section.make)
        if problems := list(check_options(function, section.options, called=section.make, key=_OPTIONS)):
            return None, problems
        task = function(**section.options)
    except OptionError as exc:
        return None, [_of_option(exc)]
    except ConfigError as exc:
        return None, [Problem(key=_MAKE, text=str(exc))]
    except ModuleNotFoundError as exc:
        return None, [Problem(key=_MAKE, text=_not_found(section.make.partition(":")[0], exc.name or str(exc)))]
    if isinstance(task, Task):
        return task, []
    returned = f"{section.make} returned {show(type(task).__name__)}, not a jdist.tasks.Task"
    return None, [Problem(key=_MAKE, text=returned)]


def _of_option(error: OptionError) -> Problem:
    key, *others = ((*_OPTIONS, *option.split(".")) for option in (error.option, *error.others))
    return Problem(key=key, text=error.text, remedy=error.remedy, others=tuple(others))


def _of_path(section: TaskSection, error: OSError) -> Problem:
    """Blames the option that an error's path is of, or is below; raises the error if no option is."""
    for key, value in leaves(section.options):
        for given in value if isinstance(value, list) else [value]:
            if isinstance(given, str) and given and isinstance(error.filename, str | os.PathLike):
                path = Path(error.filename).absolute()
                if path.is_relative_to(Path(given).expanduser().absolute()):
                    text = f"{path}: {error.strerror}"
                    return Problem(key=(*_OPTIONS, *key), text=text, remedy=near(path, ending=path.suffix))
    raise error


def import_function(make: str) -> Any:
    """Imports the function that `module:function` names; the current folder can be imported from."""
    module_name, _, function_name = make.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = importlib.import_module(module_name)
    function = vars(module).get(function_name)
    if not callable(function):
        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ConfigError(
            f"{module_name} has no function {function_name!r}.{nearest(function_name, functions, label='Its functions')}"
        )
    return function


def _not_found(wanted: str, missing: str) -> str:
    if wanted == missing or wanted.startswith(f"{missing}."):
        return f"no module {missing!r}; it must be installed, or lie in the current folder {os.getcwd()}"
    install = "'jdist[examples]'" if missing.partition(".")[0] in ("sklearn", "matplotlib") else missing
    return f"{wanted} needs the module {missing!r}, which is not installed: pip install {install}"


def make_train_step(config: Config, parts: Parts) -> DistributedStep:
    """Distributes the task's train step by the config's strategy and options."""
    train = config.train
    return distribute(
        parts.task.train_step,
        parts.strategy,
        accumulate=train.accumulate,
        steps_per_call=train.steps_per_call,
        check_replicas=train.check_replicas or 0,
        non_finite=train.non_finite,
        precision=None if train.precision is None else precision(train.precision),
        verify=train.verify,
    )


def make_eval_step(parts: Parts) -> DistributedStep:
    """Distributes the task's evaluation step by the strategy."""
    return distribute(parts.task.eval_step, parts.strategy, args=("state", "batch"), returns=("metrics",))


def state_maker(
    config: Config, parts: Parts, optimizer: optax.GradientTransformation | None = None
) -> tuple[Callable[[jax.Array], PyTree], jax.Array]:
    """Returns the function that makes the first state, and its argument, for `strategy.init`."""
    tx = optimizer or parts.optimizer
    return lambda key: parts.task.create_state(key, tx), jax.random.key(config.train.seed)
