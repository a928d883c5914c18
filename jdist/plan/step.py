"""The step that `jdist run` would compile, and the shapes it is called with; nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jdist.experiment.config import Config
from jdist.experiment.dry_run import shapes_of_run
from jdist.experiment.prepare import Parts, make_train_step
from jdist.plan.flops import count_flops
from jdist.step.mesh_step import DistributedStep
from jdist.support.arrays import is_key

PyTree = Any


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A step with the shapes of its arguments.

    Attributes:
        step: the config's train step.
        state: shapes of the state.
        batch: shapes of the global batch of one call, over all replicas, padding and mask included.
        flops: operations of the matrix products and convolutions of one optimiser step on one device.
    """

    step: DistributedStep
    state: PyTree
    batch: PyTree
    flops: float

    @property
    def state_bytes(self) -> int:
        """Bytes of the state."""
        leaves = [jax.eval_shape(jax.random.key_data, x) if is_key(x) else x for x in jax.tree.leaves(self.state)]
        return sum(x.size * x.dtype.itemsize for x in leaves)


def plan_step(config: Config, parts: Parts) -> PlannedStep:
    """The train step of an experiment, ready to be lowered.

    Args:
        config: the checked config.
        parts: what `prepare` made of it; the devices of its strategy need not be here.

    Returns:
        The step and the shapes.
    """
    steps = config.train.steps_per_call
    shapes = shapes_of_run(config, parts)
    state, batch = shapes.state, shapes.batch
    of_one_step = batch
    if steps > 1:
        of_one_step = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    # Without a strategy the step sees all rows and does the work of all replicas, none of it in jdist's own loops.
    flops = count_flops(parts.task.train_step, state, of_one_step)
    return PlannedStep(
        step=make_train_step(config, parts), state=state, batch=batch, flops=flops / parts.strategy.num_replicas
    )
