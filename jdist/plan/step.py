"""The step that `jdist run` would compile: its shapes, and its floating-point operations; nothing is allocated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdist.core.context import ReplicaTrace, tracing
from jdist.core.precision import precision
from jdist.data.leaves import MASK
from jdist.experiment.config import Config
from jdist.experiment.dry_run import batch_shapes, state_shapes
from jdist.experiment.prepare import Parts, make_train_step
from jdist.jaxpr import graph
from jdist.plan.roofline import ProductKind
from jdist.step.mesh_step import DistributedStep
from jdist.strategies.default import default

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
            return step(state, chosen.cast_to_compute(batch, keep=(MASK,)))

    return in_16_bits


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
    return count_products(function, *args).total()


def count_products(function: Any, *args: Any) -> Counter[ProductKind]:
    """Counts the operations of one call as `count_flops` does, by the kind of product."""
    return _products(jax.make_jaxpr(function)(*args).jaxpr)


def _products(jaxpr: Any) -> Counter[ProductKind]:
    total: Counter[ProductKind] = Counter()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total[_kind(eqn)] += 2 * prod(eqn.outvars[0].aval.shape) * prod(left[i] for i in contracted)
        elif name == "conv_general_dilated":
            total[_kind(eqn)] += _convolution(eqn)
        else:
            inner = [_products(closed.jaxpr) for closed in graph.nested_jaxprs(eqn)]
            if name == "cond":
                inner = [max(inner, key=Counter.total)]
            for each in inner:
                total.update({kind: flops * eqn.params.get("length", 1) for kind, flops in each.items()})
    return total


def _kind(eqn: Any) -> ProductKind:
    dtypes = [jnp.dtype(v.aval.dtype) for v in eqn.invars[:2]]
    bytes_each = max(dtype.itemsize for dtype in dtypes)
    if bytes_each <= 2:
        return "16 bits"
    if bytes_each > 4 or not any(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return "wider"
    asked = eqn.params["precision"]  # a pair, a preset, or None
    is_full = (
        lax.Precision.HIGHEST in asked if isinstance(asked, tuple) else asked == lax.DotAlgorithmPreset.F32_F32_F32
    )
    return "float32 in full" if is_full else "float32"


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
