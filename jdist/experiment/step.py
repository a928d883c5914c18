"""The train step of an experiment and the state it works on; `run` runs them, `plan` compiles them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from jdist.core.precision import precision
from jdist.experiment.config import Config
from jdist.experiment.prepare import Parts
from jdist.step.decorator import distribute
from jdist.step.mesh_step import DistributedStep

PyTree = Any


def make_train_step(config: Config, parts: Parts) -> DistributedStep:
    """The task's step under the config's strategy, with the config's options."""
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
    """The task's evaluation under the strategy."""
    return distribute(parts.task.eval_step, parts.strategy, args=("state", "batch"), returns=("metrics",))


def state_maker(
    config: Config, parts: Parts, optimizer: optax.GradientTransformation | None = None
) -> tuple[Callable[[jax.Array], PyTree], jax.Array]:
    """What makes the state at step 0, and its argument: `strategy.init(*state_maker(config, parts))`.

    Args:
        config: the checked config.
        parts: what `prepare` made of it.
        optimizer: in the place of the config's own.
    """
    tx = optimizer or parts.optimizer
    return lambda key: parts.task.create_state(key, tx), jax.random.key(config.train.seed)
