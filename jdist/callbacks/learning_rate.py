"""The learning rate among what is logged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jdist.callbacks.callback import Callback, Moment
from jdist.errors import StepError


def learning_rate_log(schedule: Callable[[Any], Any] | float, *, name: str = "learning_rate") -> Callback:
    """Logs what a schedule of optax gives for the step that each row is of.

    Args:
        schedule: `(step) -> learning rate`, the one that the optimiser was made with; or a constant.
        name: in the row.

    Returns:
        The callback.

    Raises:
        StepError: `schedule` is neither a function nor a number.

    Example:
        >>> import jdist, optax
        >>> schedule = optax.cosine_decay_schedule(1e-3, decay_steps=1000)
        >>> callbacks = [jdist.callbacks.learning_rate_log(schedule)]
    """
    if not callable(schedule) and (isinstance(schedule, bool) or not isinstance(schedule, int | float)):
        raise StepError(f"learning_rate_log: `schedule` is {schedule!r}; give optax's schedule, or a number.")

    def on_step(moment: Moment) -> None:
        if moment.row is not None:
            # optax counts from 0: the update that led to step n was made with the schedule's value at n - 1.
            moment.log(**{name: float(schedule(moment.step - 1) if callable(schedule) else schedule)})

    return Callback(on_step=on_step)
