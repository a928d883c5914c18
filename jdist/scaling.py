"""Scaling rules: hyperparameters that were tuned at one global batch, for another; and the warm-up that goes with them.

More replicas usually mean a larger global batch. Its gradient has less noise, so a step may be larger. Each rule says how
much larger, for an optimiser: `linear` for SGD, `square_root` where the linear rule is too much, `adam` for Adam. All
of them count in *examples*: k times the batch makes a k-th of the steps in an epoch. None holds for any batch; the guide
`docs/learning_rate.md` says when each does.

A global batch is what one update sees: the rows of all replicas and of all microbatches of `accumulate`, times the k of
`optax.MultiSteps(tx, k)`. Under an asynchronous parameter server it is the batch of one worker.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar, cast

import jax.numpy as jnp
import optax

from jdist.errors import ScalingError
from jdist.support import checks
from jdist.support.checks import as_real

# A number, or a function of the number of updates; a rule returns the kind that it was given.
Rate = TypeVar("Rate", float, optax.Schedule)


def linear(value: Rate, *, base_batch: int, global_batch: int) -> Rate:
    """Scales SGD's learning rate to another batch by the linear rule: k times the batch, k times the rate.

    Args:
        value: the learning rate at `base_batch`: a number or a schedule.
        base_batch: the global batch that `value` was tuned at, in examples.
        global_batch: the global batch to train with, in examples.

    Returns:
        `value * global_batch / base_batch`; a schedule where `value` is one, with its steps unchanged.

    Raises:
        ScalingError: a batch is not a positive whole number, or `value` is neither a number nor a schedule.

    Example:
        >>> linear(0.1, base_batch=256, global_batch=8192)
        3.2

    Source: Goyal et al. 2017, arXiv:1706.02677; Krizhevsky 2014, arXiv:1404.5997.
    """
    return _times(value, _ratio(base_batch, global_batch), rule="linear")


def square_root(value: Rate, *, base_batch: int, global_batch: int) -> Rate:
    """Scales a learning rate to another batch by the square root rule: the noise of an update stays the same.

    Args:
        value: the learning rate at `base_batch`: a number or a schedule.
        base_batch: the global batch that `value` was tuned at, in examples.
        global_batch: the global batch to train with, in examples.

    Returns:
        `value * sqrt(global_batch / base_batch)`; a schedule where `value` is one, with its steps unchanged.

    Raises:
        ScalingError: a batch is not a positive whole number, or `value` is neither a number nor a schedule.

    Example:
        >>> square_root(0.1, base_batch=256, global_batch=1024)
        0.2

    Source: Krizhevsky 2014, arXiv:1404.5997; Hoffer et al. 2017, arXiv:1705.08741.
    """
    return _times(value, math.sqrt(_ratio(base_batch, global_batch)), rule="square_root")


def adam(
    learning_rate: float | optax.Schedule,
    *,
    base_batch: int,
    global_batch: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> dict[str, Any]:
    """Scales Adam's hyperparameters to another batch: its averages span as many examples as before.

    Args:
        learning_rate: at `base_batch`: a number or a schedule.
        base_batch: the global batch that the others were tuned at, in examples.
        global_batch: the global batch to train with, in examples.
        b1: decay of the average of gradients at `base_batch`.
        b2: decay of the average of their squares at `base_batch`.
        eps: what the denominator is kept above with at `base_batch`.

    Returns:
        `learning_rate * sqrt(k)`, `b1` and `b2` as `1 - k * (1 - b)`, and `eps / sqrt(k)`, under the names of `optax.adam`.

    Raises:
        ScalingError: as `linear`; or the batch is so large that an average would span less than one step.

    Example:
        >>> hyperparameters = adam(1e-3, base_batch=256, global_batch=1024, b2=0.99)
        >>> {name: round(value, 10) for name, value in hyperparameters.items()}
        {'learning_rate': 0.002, 'b1': 0.6, 'b2': 0.96, 'eps': 5e-09}
        >>> tx = optax.adam(**hyperparameters)

    Source: Malladi et al. 2022, arXiv:2205.10287.
    """
    ratio = _ratio(base_batch, global_batch)
    decays = {"b1": b1, "b2": b2}
    for name, decay in decays.items():
        number = as_real(decay)
        if number is None or not 0 <= number < 1:
            raise ScalingError(
                f"jdist.scaling.adam: `{name}` is {decay!r}; it must be a number of at least 0 and below 1."
            )
        if decay and ratio * (1 - decay) > 1 + 1e-9:  # 10 * (1 - 0.9) is meant to be 1
            raise ScalingError(
                f"jdist.scaling.adam: a global batch of {global_batch:,} is {ratio:g} times `base_batch`, {base_batch:,}, but "
                f"with `{name}`={decay:g} the rule ends at {1 / (1 - decay):g} times: beyond it the average would span less "
                f"than one step. Take a global batch of at most {math.floor(base_batch / (1 - decay) + 1e-6):,}, or scale "
                "the learning rate alone, by `jdist.scaling.square_root`."
            )
    return {
        "learning_rate": _times(learning_rate, math.sqrt(ratio), rule="adam"),
        **{name: max(0.0, 1 - ratio * (1 - decay)) if decay else 0.0 for name, decay in decays.items()},
        "eps": eps / math.sqrt(ratio),
    }


def gradual_warmup(value: float | optax.Schedule, *, steps: int, init_value: float = 0.0) -> optax.Schedule:
    """Makes a schedule that rises in `steps` equal increments from `init_value` to `value`, which it then follows.

    The scaling rules fail first at the very start, where the parameters change fast and a large rate does harm. The schedule
    that follows is not moved: its step 30 is the run's step 30, and the warm-up ends at its value at `steps`.

    Args:
        value: a number, or any schedule of optax.
        steps: updates until `value` is reached; 0 for no warm-up.
        init_value: the rate of the first update; Goyal et al. take the one of a single worker.

    Returns:
        A schedule, for any place where optax takes one.

    Raises:
        ScalingError: `steps` is not a whole number, or negative; a value is neither a number nor, but for `init_value`, a
            schedule.

    Example:
        >>> rate = gradual_warmup(optax.constant_schedule(0.5), steps=5)
        >>> [round(float(rate(step)), 3) for step in (0, 1, 4, 5, 100)]
        [0.0, 0.1, 0.4, 0.5, 0.5]

    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.2.
    """
    call = "jdist.scaling.gradual_warmup"
    checks.whole_number("steps", steps, ScalingError, least=0, call=call)
    checks.real_number("init_value", init_value, ScalingError, call=call)
    if as_real(value) is None and not callable(value):
        raise ScalingError(_no_rate("gradual_warmup", value))
    after = value if callable(value) else optax.constant_schedule(value)

    def schedule(count: Any) -> Any:
        way_up = init_value + (after(steps) - init_value) * count / max(steps, 1)
        return jnp.where(count < steps, way_up, after(count))

    return schedule


def _ratio(base_batch: int, global_batch: int) -> float:
    sizes: list[int] = []
    for name, batch in (("base_batch", base_batch), ("global_batch", global_batch)):
        sizes.append(checks.whole_number(name, batch, ScalingError, unit="examples", call="jdist.scaling"))
    return sizes[1] / sizes[0]


def _times(value: Any, factor: float, *, rule: str) -> Any:
    if callable(value):
        schedule = cast(optax.Schedule, value)
        return lambda count: schedule(count) * factor
    rate = as_real(value)
    if rate is None:
        raise ScalingError(_no_rate(rule, value))
    return rate * factor


def _no_rate(rule: str, value: Any) -> str:
    return f"jdist.scaling.{rule}: the value is {value!r}; it must be a number, or a schedule: a function of the step."
