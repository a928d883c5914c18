"""The learning rate in logged rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from jdist.callbacks.callback import Callback, Moment
from jdist.errors import StepError
from jdist.step.tree_checks import kind_of
from jdist.support.arrays import to_host
from jdist.support.checks import is_number


def learning_rate_log(
    schedule: Callable[[Any], Any] | jax.typing.ArrayLike, *, name: str = "learning_rate"
) -> Callback:
    """Logs the learning rate that the newest update was made with.

    The count of updates is the optimiser's own, where it keeps one for its schedule: steps that were left out, as a gradient
    was not finite, do not count, and those behind the state that a run began with do. Where it is not at hand (an optimiser of
    another kind, parameter servers) the run's steps are counted.

    Args:
        schedule: `(step) -> learning rate`, the one that the optimiser was made with; or a constant.
        name: in the row.

    Returns:
        The callback.

    Raises:
        StepError: `schedule` is neither a function nor a number; while training: it returns no single number.

    Example:
        >>> import jdist, optax
        >>> schedule = optax.cosine_decay_schedule(1e-3, decay_steps=1000)
        >>> callbacks = [jdist.callbacks.learning_rate_log(schedule)]
    """
    if not callable(schedule) and (isinstance(schedule, bool) or not is_number(schedule)):
        raise StepError(f"learning_rate_log: `schedule` is {schedule!r}; give optax's schedule, or a number.")

    def on_step(moment: Moment) -> None:
        if moment.row is not None:
            moment.log(**{name: _rate_at(schedule, _count_updates(moment) - 1) if callable(schedule) else schedule})

    return Callback(on_step=on_step, name="learning_rate_log", logs=(name,))


def _rate_at(schedule: Callable[[Any], Any], count: int) -> float:
    rate = schedule(count)
    if not is_number(rate):
        raise StepError(
            f"learning_rate_log: `schedule` gives {kind_of(rate)} for step {count}; it must give one number."
        )
    return float(rate)


def _count_updates(moment: Moment) -> int:
    """Counts the updates made, at least 1. Optax counts from 0: the n-th is made with the schedule's value at n - 1."""
    nodes = jax.tree.leaves(moment.state, is_leaf=lambda node: isinstance(node, optax.ScaleByScheduleState))
    counts = [int(to_host(node.count)) for node in nodes if isinstance(node, optax.ScaleByScheduleState)]
    return max(1, counts[0] if counts else moment.step)
