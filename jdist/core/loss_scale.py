"""Dynamic loss scaling: small gradients are kept from vanishing in float16, and too large a scale backs off by itself."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.errors import StepError
from jdist.support.checks import as_int, as_real

SMALLEST = 1.0  # what does not fit at this scale is no overflow that a smaller one would mend
FACTOR = 2.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """What loss scaling carries from step to step; the same on every replica.

    Attributes:
        scale: what the loss is multiplied by before it is differentiated; float32 scalar, a power of two.
        good_steps: how many steps in a row had finite gradients since the scale last changed; int32 scalar.
        num_skipped: how many steps were left out since the scale began; int32 scalar.
    """

    scale: Any
    good_steps: Any
    num_skipped: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaling:
    """How a loss scale moves: twice as large after enough finite gradients in a row, half after one that is not.

    Attributes:
        initial: the scale at first; a power of two, so that scaling rounds nothing.
        growth_interval: number of steps in a row after which the scale grows.

    Source: Micikevicius et al. 2018, Mixed Precision Training (https://arxiv.org/abs/1710.03740), section 3.2; the numbers
    are those of `keras.optimizers.LossScaleOptimizer`.
    """

    initial: float = 2.0**15
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        number = as_real(self.initial)
        if number is None or not SMALLEST <= number <= 2.0**100 or math.frexp(number)[0] != 0.5:
            raise StepError(
                f"`initial_scale` is {self.initial!r}; it must be a power of two between 1 and 2**100, so that scaling rounds "
                "nothing. The usual one is 2.0**15."
            )
        interval = self.growth_interval
        steps = as_int(interval, least=1)
        if steps is None:
            raise StepError(
                f"`growth_interval` is {interval!r}; it must be a number of steps, an integer of at least 1."
            )
        object.__setattr__(self, "initial", float(number))
        object.__setattr__(self, "growth_interval", steps)

    def begin(self) -> LossScale:
        """The loss scale before the first step, on the host."""
        return LossScale(np.float32(self.initial), np.int32(0), np.int32(0))

    def after(self, now: LossScale, is_finite: jax.Array) -> LossScale:
        """The loss scale after a step.

        Args:
            now: the one that the step was made with.
            is_finite: whether all its gradients, of all replicas together, are finite; bool scalar.
        """
        good = now.good_steps + 1
        grows = good >= self.growth_interval
        larger = now.scale * FACTOR
        grown = jnp.where(grows & jnp.isfinite(larger), larger, now.scale)
        fallen = jnp.maximum(now.scale / FACTOR, SMALLEST)
        return LossScale(
            jnp.where(is_finite, grown, fallen),
            jnp.where(is_finite & ~grows, good, 0),
            now.num_skipped + ~is_finite,
        )
