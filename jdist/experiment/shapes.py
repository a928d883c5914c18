"""The shapes that a run's steps are called with; nothing is allocated on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import optax

from jdist.data.distribute import distributed_dataset
from jdist.experiment.config import Config
from jdist.experiment.prepare import Parts
from jdist.experiment.step import state_maker

PyTree = Any


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Trees of `jax.ShapeDtypeStruct`.

    Attributes:
        state: the state.
        parameters: what the optimizer is initialised with, a tree for each time.
        batch: the global batch of one call, over all replicas, padding and mask included.
    """

    state: PyTree
    parameters: tuple[PyTree, ...]
    batch: PyTree


def shapes_of_run(config: Config, parts: Parts) -> Shapes:
    """The shapes of state and batch.

    Args:
        config: the checked config.
        parts: what `prepare` made of it; the devices of its strategy need not be here.
    """
    parameters: list[PyTree] = []

    def init(params: PyTree) -> PyTree:
        parameters.append(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params))
        return parts.optimizer.init(params)

    # A task's state may be any tree: only its optimizer is told which part of it are the parameters.
    create, key = state_maker(config, parts, optax.GradientTransformationExtraArgs(init, parts.optimizer.update))
    state = jax.eval_shape(create, key)
    batch = batch_shapes(parts, parts.train_data, steps_per_call=config.train.steps_per_call)
    return Shapes(state=state, parameters=tuple(parameters), batch=batch)


def batch_shapes(parts: Parts, source: Any, *, steps_per_call: int = 1) -> PyTree:
    """Shapes of what a step receives of a source; one batch is made for it."""
    dataset = distributed_dataset(
        source, num_replicas=parts.strategy.num_replicas, place=None, steps_per_call=steps_per_call, prefetch=0
    )
    return dataset.element_spec
