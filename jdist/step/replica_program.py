"""The program of one replica in one call: the user's step, accumulated, guarded and repeated as the options say."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jdist.core.context import ReplicaTrace, tracing
from jdist.core.step_state import residuals_of
from jdist.jaxpr import graph, variation
from jdist.replica import collectives
from jdist.step.divergence import check_averages_combined
from jdist.step.error_feedback import ErrorFeedback
from jdist.step.loops import repeated
from jdist.step.microbatches import microbatched
from jdist.step.non_finite import finite_guarded
from jdist.step.notices import notice
from jdist.step.outputs import LOCAL, METRIC, OutputKind, check_means, kinds_of, rows_of
from jdist.step.program_spec import FiniteFlags, ProgramSpec, RunFn, StepFn
from jdist.step.signature import Others
from jdist.step.tree_checks import check_same_state
from jdist.typing import PyTree


def replica_program(spec: ProgramSpec) -> StepFn:
    """Builds `(token, state, batches, others) -> (token, state, outputs)`, which every replica runs."""
    run = on_whole_batch(spec) if spec.options.accumulate == 1 else microbatched(spec)
    step = finite_guarded(spec, state_checked(spec, run))
    if spec.options.steps_per_call > 1:
        step = repeated(spec, step)
    return shaping_residuals(spec, run, step) if spec.strategy.keeps_residuals else step


def on_whole_batch(spec: ProgramSpec) -> RunFn:
    """Runs the user's step on a replica's whole batch, and averages the metrics that differ from replica to replica."""
    strategy = spec.strategy
    # Virtual CPU devices share one memory, so each checks its own part of the gradients and they exchange the results.
    # On devices with memories of their own, or in several processes, that exchange takes longer than checking all.
    bound = bool(strategy.bound_axes)
    one_process = len({device.process_index for device in strategy.devices}) == 1
    shares_memory = bound and one_process and strategy.devices[0].platform == "cpu"

    def run(state: PyTree, batches: PyTree, others: Others) -> tuple[PyTree, tuple[PyTree, ...], FiniteFlags]:
        kinds, names, hidden = list[OutputKind](), list[str](), list[bool]()

        def as_written(
            state: PyTree, batches: PyTree, others: Others, by_rows: frozenset[Any]
        ) -> tuple[PyTree, tuple[PyTree, ...], list[Any]]:
            feedback = None
            if strategy.keeps_residuals:
                state, feedback = ErrorFeedback.of(strategy, spec.name, state)
            sum_gradient = feedback.sum if feedback else None
            trace = ReplicaTrace(strategy, looks_at_parts=shares_memory, sum_gradient=sum_gradient, by_rows=by_rows)
            with tracing(trace):
                new_state, outputs, flags = spec.apply(state, batches, others)
            kinds[:] = jax.tree.leaves(kinds_of(outputs, spec.traced, rows_of(batches)))
            names[:], hidden[:] = flags.names, [flags.hidden]
            return (feedback.close(new_state) if feedback else new_state), outputs, flags.finite

        # The traced step shows which metrics differ from replica to replica.
        arguments = state, batches, others
        closed, varying, by_weights, shapes = variation.traced(
            lambda by_rows: jax.make_jaxpr(partial(as_written, by_rows=by_rows), return_shape=True)(*arguments),
            lambda closed: _of_replica(closed, arguments),
        )
        variables = graph.body_of(closed)
        places = jax.tree.unflatten(jax.tree.structure(arguments), variables.invars)
        old, own = jax.tree.leaves(places[0]), jax.tree.leaves(places[1])
        notice(spec.name, closed, own, strategy.num_replicas if bound else 1, by_weights=by_weights)
        new_state, outputs, finite = jax.tree.unflatten(
            jax.tree.structure(shapes),
            graph.call(graph.forwarded(closed, collectives=True), jax.tree.leaves(arguments)),
        )
        if spec.compares_replicas and "state" in spec.traced.returns:
            new = variables.outvars[: len(jax.tree.leaves(shapes[0]))]
            if any(graph.is_in(v, varying) for v in new):
                check_averages_combined(closed, old, new, own, shapes[0], (strategy.num_replicas, 1))
        rows = rows_of(batches) if bound else None  # of one replica nothing is averaged
        metrics = averaged_metrics(closed, shapes, varying, kinds, rows)
        with tracing(ReplicaTrace(strategy)):
            if shares_memory and finite:
                finite = list(jax.lax.pmin(jnp.stack(finite).astype(jnp.int32), strategy.axes) > 0)
            outputs = average(outputs, metrics)
        own = iter(kinds)
        outputs = jax.tree.map(lambda x: jnp.asarray(x)[None] if next(own) == LOCAL else x, outputs)
        return new_state, outputs, FiniteFlags(names, finite, hidden[0])

    return run


def state_checked(spec: ProgramSpec, run: RunFn) -> RunFn:
    """Refuses a new state that has not the old one's shapes; of a step that returns none, hands the old one on."""

    def checked(state: PyTree, batches: PyTree, others: Others) -> tuple[PyTree, tuple[PyTree, ...], FiniteFlags]:
        new_state, outputs, flags = run(state, batches, others)
        if "state" not in spec.traced.returns:
            return state, outputs, FiniteFlags([], [], hidden=False)
        return check_same_state(state, new_state), outputs, flags

    return checked


def shaping_residuals(spec: ProgramSpec, run: RunFn, step: StepFn) -> StepFn:
    """Wraps a program so that a state without residuals can be traced for their shapes."""

    def either(token: jax.Array, state: PyTree, batches: PyTree, others: Others) -> Any:
        if spec.name in residuals_of(state):
            return step(token, state, batches, others)
        # Traced and never run: one unguarded step.
        first = batches if spec.options.steps_per_call == 1 else jax.tree.map(lambda x: x[0], batches)
        state, outputs, _ = run(state, first, others)
        return token, state, outputs

    return either


def _of_replica(closed: Any, arguments: Any) -> list[Any]:
    """Finds the arguments of a traced step, `(state, batches, others)`, that differ from replica to replica."""
    state, batches, _ = jax.tree.unflatten(jax.tree.structure(arguments), graph.body_of(closed).invars)
    return [*jax.tree.leaves(batches), *jax.tree.leaves(residuals_of(state))]


def averaged_metrics(
    closed: Any, shapes: Any, varying: Collection[Any], kinds: list[OutputKind], rows: int | None
) -> list[bool]:
    """Finds the outputs of a traced step that are metrics and differ between the replicas."""
    new_state, outputs, _ = shapes
    jaxpr = graph.body_of(closed)
    first = len(jax.tree.leaves(new_state))
    is_averaged = [
        kind == METRIC and graph.is_in(v, varying)
        for v, kind in zip(jaxpr.outvars[first : first + len(kinds)], kinds, strict=True)
    ]
    check_means(outputs, is_averaged, rows)
    return is_averaged


def average(outputs: PyTree, which: list[bool]) -> PyTree:
    """Averages some of the outputs' leaves over the replicas, all in one all-reduce."""
    leaves, treedef = jax.tree.flatten(outputs)
    places = [i for i, is_mean in enumerate(which) if is_mean]
    if places and collectives.num_replicas() > 1:
        for i, leaf in zip(places, collectives.all_reduce([leaves[i] for i in places], "mean"), strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)
