"""Loops over microbatches, and over the steps of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jdist.core.step_state import loss_scale_of
from jdist.core.strategy import Strategy
from jdist.jaxpr import graph
from jdist.step.non_finite import STEP_ENTRIES, VERDICT
from jdist.step.outputs import LOCAL, kinds_of
from jdist.step.program_spec import ProgramSpec, StepFn
from jdist.typing import PyTree


def repeated(spec: ProgramSpec, step: StepFn) -> StepFn:
    """Runs a step for each batch of a stack in one call."""

    def many(token: jax.Array, state: PyTree, batches: PyTree, others: Any) -> Any:
        first = jax.tree.map(lambda x: x[0], batches)
        shapes = jax.eval_shape(step, token[:STEP_ENTRIES], state, first, others)[2]
        token, state, outputs = repeat(
            spec, lambda token, state, batch: step(token, state, batch, others), token, state, batches
        )
        kinds = iter(jax.tree.leaves(kinds_of(shapes, spec.traced)))
        # The axis of replicas comes before that of the steps.
        return token, state, jax.tree.map(lambda x: x.swapaxes(0, 1) if next(kinds) == LOCAL else x, outputs)

    return many


def repeat(
    spec: ProgramSpec,
    once: Callable[[jax.Array, PyTree, PyTree], tuple[jax.Array, PyTree, PyTree]],
    token: jax.Array,
    state: PyTree,
    batches: PyTree,
) -> tuple[jax.Array, PyTree, PyTree]:
    """Loops over stacked batches with a step `(token, state, batch) -> (token, state, results)`."""
    # The returned token has an entry for each step that says whether it was left out.

    def body(carry: Any, batch: PyTree) -> Any:
        before, old = carry
        token, state, results = once(before, old, batch)
        return (token, state), (results, _was_left_out(before, token, old, state))

    (token, state), (results, left_out) = scan(spec.strategy, body, (token[:STEP_ENTRIES], state), batches)
    # The last call of a data set may make fewer steps than the others.
    missing = spec.options.steps_per_call - left_out.size
    return jnp.concatenate([token, jnp.pad(left_out.astype(jnp.int32), (0, missing))]), state, results


def _was_left_out(before: jax.Array, after: jax.Array, old: PyTree, new: PyTree) -> jax.Array:
    """Returns whether a step was left out, from its token and its state before and after; bool scalar."""
    scales = loss_scale_of(old), loss_scale_of(new)
    if scales[0] is not None and scales[1] is not None:
        return scales[1].num_skipped > scales[0].num_skipped
    return after[VERDICT] > before[VERDICT]


def scan(strategy: Strategy, body: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any) -> tuple[Any, Any]:
    """Runs `lax.scan`, unrolled if convolutions in it would be far slower on XLA's CPU backend."""
    # They are more than 20 times slower; `benchmarks/loops_on_cpu.py` measures it.
    platform = strategy.devices[0].platform if strategy.devices else jax.default_backend()
    unroll = False
    if platform == "cpu":
        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
        unroll = graph.contains_primitive(jax.make_jaxpr(body)(init, first), "conv_general_dilated")
    return jax.lax.scan(body, init, xs, unroll=unroll or 1)
