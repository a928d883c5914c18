"""The step that `jdist run` would compile: its shapes, and its floating-point operations; nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np

from jdist.experiment.config import Config
from jdist.experiment.dry_run import batch_shapes, state_shapes
from jdist.experiment.prepare import Parts, make_train_step
from jdist.jaxpr import graph
from jdist.step.mesh_step import DistributedStep

PyTree = Any


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """The step of a config, and the shapes of its arguments."""

    step: DistributedStep  # the config's train step
    state: PyTree  # shapes of the state
    batch: PyTree  # shapes of the global batch of one call, over all replicas, padding and mask included
    flops: float  # operations of the matrix products and convolutions of one optimiser step on one device


def plan_step(config: Config, parts: Parts) -> PlannedStep:
    """Makes the train step of an experiment, ready to be lowered; the devices of its strategy need not be here."""
    steps = config.train.steps_per_call
    state, _ = state_shapes(config, parts)
    batch = batch_shapes(parts, parts.train_data, steps_per_call=steps)
    of_one_step = batch
    if steps > 1:
        of_one_step = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    # Without a strategy the step sees all rows and does the work of all replicas, none of it in jdist's own loops.
    flops = count_flops(parts.task.train_step, state, of_one_step)
    return PlannedStep(
        step=make_train_step(config, parts), state=state, batch=batch, flops=flops / parts.strategy.num_replicas
    )


def count_flops(function: Any, *args: Any) -> int:
    """Counts the operations of one call from its jaxpr, as the compiler's own count takes a loop's body once.

    Args:
        function: a pure function; it is not run.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct`s.

    Returns:
        Those of all devices together: two for each multiply-add of a `dot_general` or convolution. The body of a `scan`
        counts as often as it runs, of a `while_loop` once, of a conditional the branch with most.

    Example:
        >>> import jax.numpy as jnp
        >>> count_flops(lambda x: x @ x, jnp.ones((8, 8)))
        1024
    """
    return _flops(jax.make_jaxpr(function)(*args).jaxpr)


def _flops(jaxpr: Any) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total += 2 * prod(eqn.outvars[0].aval.shape) * prod(left[i] for i in contracted)
        elif name == "conv_general_dilated":
            total += _convolution(eqn)
        else:
            inner = [_flops(closed.jaxpr) for closed in graph.nested_jaxprs(eqn)]
            if inner:
                total += max(inner) if name == "cond" else sum(inner) * eqn.params.get("length", 1)
    return total


def _convolution(eqn: Any) -> int:
    """Counts a convolution, without products with padding and with the zeros between dilated inputs."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    image, kernel, result = (v.aval.shape for v in (*eqn.invars[:2], eqn.outvars[0]))
    pairs = 1
    for d in range(len(result) - 2):
        low, _ = params["padding"][d]
        spread, apart = params["lhs_dilation"][d], params["rhs_dilation"][d]
        outputs = np.arange(result[numbers.out_spec[d + 2]]) * params["window_strides"][d]
        at = outputs[:, None] + np.arange(kernel[numbers.rhs_spec[d + 2]]) * apart - low
        inside = (at >= 0) & (at <= (image[numbers.lhs_spec[d + 2]] - 1) * spread) & (at % spread == 0)
        pairs *= int(inside.sum())
    rows, features = (result[numbers.out_spec[i]] for i in (0, 1))
    return 2 * rows * features * kernel[numbers.rhs_spec[1]] * pairs
