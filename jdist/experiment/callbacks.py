"""`callbacks` of a config -> the callbacks of its run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jdist import callbacks
from jdist.callbacks import Callback
from jdist.errors import ConfigError, StepError
from jdist.experiment.config import Config
from jdist.experiment.load import Document
from jdist.experiment.prepare import Parts
from jdist.experiment.validate import Problem, refusal


def make_callbacks(config: Config, parts: Parts, document: Document, folder: Path) -> list[Callback]:
    """The callbacks that a config names.

    Args:
        config: the checked config.
        parts: what `prepare` made of it.
        document: what it was read from, for the origins in messages.
        folder: the run folder, in which what they write is, unless its path is absolute.

    Raises:
        ConfigError: one line for each that cannot be made.
    """
    made, problems = [], []
    for i, section in enumerate(config.callbacks):
        options = section.options.model_dump()
        try:
            made.append(_MAKE[section.name](options, parts, folder))
        except (ConfigError, StepError) as exc:
            text = str(exc).removeprefix(f"{section.name}: ")
            problems.append(Problem(key=("callbacks", str(i), section.name), text=text))
    if problems:
        raise refusal(document, problems)
    return made


def _learning_rate_log(options: dict[str, Any], parts: Parts, _: Path) -> Callback:
    if parts.learning_rate is None:
        raise ConfigError("train.optimizer has no `learning_rate`, so there is none to log")
    return callbacks.learning_rate_log(parts.learning_rate, **options)


_MAKE: dict[str, Callable[[dict[str, Any], Parts, Path], Callback]] = {
    "early_stopping": lambda options, parts, folder: callbacks.early_stopping(**options),
    "ema": lambda options, parts, folder: callbacks.ema(**options),
    "learning_rate_log": _learning_rate_log,
    "nan_guard": lambda options, parts, folder: callbacks.nan_guard(*options["metrics"]),
    "csv": lambda options, parts, folder: callbacks.csv(folder / options["path"]),
    "tensorboard": lambda options, parts, folder: callbacks.tensorboard(folder / options["folder"]),
    "wandb": lambda options, parts, folder: callbacks.wandb(**options),
    "profiler": lambda options, parts, folder: callbacks.profiler(folder / options.pop("folder"), **options),
}
