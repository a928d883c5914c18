"""The step that `jdist run` would compile: its shapes, and its floating-point operations; nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jdist.core.context import ReplicaTrace, tracing
from jdist.core.precision import precision
from jdist.experiment.config import Config
from jdist.experiment.dry_run import batch_shapes, state_shapes
from jdist.experiment.prepare import Parts, make_train_step
from jdist.jaxpr.flops import count_products
from jdist.step.mesh_step import DistributedStep
from jdist.strategies.default import default
from jdist.support.chips import ProductKind

PyTree = Any


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """The step of a config, and the shapes of its arguments."""

    step: DistributedStep  # the config's train step
    state: PyTree  # shapes of the state
    batch: PyTree  # shapes of the global batch of one call, over all replicas, padding and mask included
    products: dict[ProductKind, float]  # operations of matrix products and convolutions in one step on one device

    @property
    def flops(self) -> float:
        return sum(self.products.values())


def plan_step(config: Config, parts: Parts) -> PlannedStep:
    """Makes the train step of an experiment, ready to be lowered; the devices of its strategy need not be here."""
    steps = config.train.steps_per_call
    state, _ = state_shapes(config, parts)
    batch = batch_shapes(parts, parts.train_data, steps_per_call=steps)
    of_one_step = batch
    if steps > 1:
        of_one_step = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    # Without a strategy the step sees all rows and does the work of all replicas, none of it in jdist's own loops.
    products = count_products(_in_precision(parts.task.train_step, config.train.precision), state, of_one_step)
    return PlannedStep(
        step=make_train_step(config, parts),
        state=state,
        batch=batch,
        products={kind: flops / max(1, len(parts.strategy.devices)) for kind, flops in products.items()},
    )


def _in_precision(step: Any, name: str | None) -> Any:
    """Makes a step compute as under `jdist.distribute(..., precision=...)`, for the dtypes of its products."""
    if name is None:
        return step
    chosen = precision(name)

    def in_16_bits(state: PyTree, batch: PyTree) -> Any:
        with tracing(ReplicaTrace(strategy=default(), precision=chosen)):
            return step(state, chosen.cast_to_compute(batch))

    return in_16_bits
