"""What a task's steps measured, as plain numbers; what cannot be one is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jdist.errors import StepError
from jdist.experiment.config import Config
from jdist.experiment.load import Document
from jdist.experiment.names import nearest
from jdist.experiment.validate import Problem, refusal, show
from jdist.loop.tally import loss_first


def newest(metrics: Any, *, steps_per_call: int) -> dict[str, float]:
    """Metrics of the last step of a call as plain numbers.

    Args:
        metrics: what the call returned: scalars by name, each [steps_per_call] if that is more than 1.
        steps_per_call: how many steps the call made.

    Raises:
        StepError: the task's step returned something else.
    """
    if not isinstance(metrics, Mapping):
        raise StepError(
            f"the task's train_step returned {type(metrics).__name__} for metrics; return a dict of scalars."
        )
    shape = () if steps_per_call == 1 else (steps_per_call,)
    values = jax.device_get(dict(metrics))
    for name, value in values.items():
        if np.shape(value) != shape:
            raise StepError(
                f"the task's train_step returned metric {name!r} with {np.size(value):,} values, not a scalar."
            )
    return loss_first({name: float(np.ravel(value)[-1]) for name, value in values.items()})


def check_best(config: Config, measured: Iterable[str], document: Document) -> None:
    """Refuse a `checkpoint.best` that the task does not measure.

    Args:
        config: the checked config.
        measured: names of the metrics of an evaluation.
        document: what the config was read from.

    Raises:
        ConfigError: it names none of them.
    """
    best, names = config.checkpoint.best, set(measured)
    if best is not None and best not in names:
        problem = Problem(
            key=("checkpoint", "best"),
            text=f"the task's evaluation has no metric {show(best)}",
            remedy=nearest(best, names, label="It has"),
        )
        raise refusal(document, [problem])
