"""What one replica computes in one call: the user's step, accumulated, guarded and repeated as the options say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jdist.core.context import ReplicaTrace, current_trace, tracing
from jdist.core.loss_scale import LossScaling
from jdist.core.precision import InUse
from jdist.core.step_state import loss_scale_of, residuals_of, user_state, with_user_state
from jdist.core.strategy import Strategy
from jdist.data.batch_axis import rows_first
from jdist.data.leaves import MASK
from jdist.jaxpr import graph
from jdist.replica import collectives
from jdist.step.accumulate import Pure, accumulated, scan
from jdist.step.error_feedback import ErrorFeedback, has_residuals
from jdist.step.non_finite import FiniteFlags, FlagNames, guarded, token_of_steps, token_size, was_left_out
from jdist.step.options import NonFinite, StepOptions
from jdist.step.outputs import LOCAL, METRIC, Traced, check_means, differs, kinds_of, rows_of, sort_results
from jdist.step.own_averages import check_averages_combined
from jdist.step.signature import Call, Step
from jdist.step.tree_checks import check_same_state, check_state

PyTree = Any
ReplicaFunction = Callable[[jax.Array, PyTree, PyTree, PyTree], tuple[jax.Array, PyTree, tuple[PyTree, ...]]]


@dataclass(frozen=True)
class ProgramSpec:
    """What a program is made of.

    Attributes:
        step: the user's step.
        strategy: what it runs under.
        options: the decorator's options.
        call: how the arguments of a call are laid out.
        traced: filled in while tracing.
        watched: takes in the names that the token's codes stand for.
        name: the step's, under which a state keeps its residuals.
    """

    step: Step
    strategy: Strategy
    options: StepOptions
    call: Call
    traced: Traced
    watched: FlagNames
    name: str

    def turn(self, batches: PyTree) -> PyTree:
        """The batches of a call with their rows first, as a program takes them; `Call.apply` turns them back."""
        return rows_first(batches, self.call.batch_axes, lead=int(self.options.steps_per_call > 1))

    @property
    def donate(self) -> bool:
        """Whether the old state's buffers may be reused for the new state."""
        return self.options.donate and self.options.may_update_state

    @property
    def compares_replicas(self) -> bool:
        """Whether the state must be the same on all replicas, each of which sees rows of its own."""
        strategy, options = self.strategy, self.options
        several = strategy.num_replicas > 1 and strategy.transform != "jit"
        return several and options.may_update_state and bool(options.check_replicas)

    @property
    def policy(self) -> NonFinite:
        """What a non-finite gradient does; of a step that updates nothing, nothing."""
        return self.options.non_finite if self.options.may_update_state else "apply"

    @property
    def loss_scaling(self) -> LossScaling | None:
        """How the loss scale in the state moves; None: it has none, or stays."""
        return self.options.loss_scaling if self.options.may_update_state else None

    def apply(self, state: PyTree, batches: PyTree, others: PyTree) -> tuple[PyTree, tuple[PyTree, ...], FiniteFlags]:
        """Calls the step under the current trace: the new state, the outputs by role, what was seen of the gradients."""
        trace = current_trace()
        assert trace is not None  # every caller traces under one
        own, precision, in_use = user_state(state), self.options.precision, None
        if precision is not None:
            precision.check_names((own, batches))
            batches = precision.cast_to_compute(batches, keep=(MASK,))  # sums of weights are exact
            in_use = InUse(precision, self._loss_scale(state, others))
        # Copies of the containers: what a step changes in place is its own, whoever else looks at what came in.
        given, batches, others = jax.tree.map(lambda x: x, (own, batches, others))
        with tracing(dataclasses.replace(trace, precision=in_use)):
            called = self.call.apply(self.step, given, batches, others)
            new_state, outputs = sort_results(called, own, self.options, self.traced)
            check_state(new_state, "the state that the step returned")
            if self.options.may_update_state:
                self.traced.changes_state |= differs(jax.tree.leaves(own), jax.tree.leaves(new_state))
        if precision is not None:
            outputs = jax.tree.map(precision.cast_to_output, outputs)
        return with_user_state(state, new_state), outputs, FiniteFlags.of(trace)

    def _loss_scale(self, state: PyTree, others: PyTree) -> Any:
        """What losses are multiplied by, if by anything; it is in the state, or where a parameter server's worker puts it."""
        if self.options.loss_scaling is None:
            return None
        loss_scale = loss_scale_of(state)
        return others[2] if loss_scale is None else loss_scale.scale

    def splittable(self, seen: list[FiniteFlags]) -> Pure:
        """The step as `accumulate.make_plan` takes it, the flags behind the outputs; appends them to `seen`, too."""

        def pure(state: PyTree, batches: PyTree, others: PyTree) -> tuple[PyTree, Any, list[str]]:
            new_state, outputs, flags = self.apply(state, batches, others)
            seen.append(flags)
            # The flags are made from the combined gradients, as some metrics are, and are the same on all replicas.
            kinds = [*jax.tree.leaves(kinds_of(outputs, self.traced, rows_of(batches))), *[METRIC] * len(flags.finite)]
            return new_state, (*outputs, flags.finite), kinds

        return pure


def replica_step(spec: ProgramSpec) -> ReplicaFunction:
    """The function that every replica runs.

    Returns:
        `(token, state, batches, others) -> (token, state, outputs)`, `outputs` without the state, one by return role;
        for the token see `guard`.
    """
    strategy, options, traced, name = spec.strategy, spec.options, spec.traced, spec.name
    # Virtual CPU devices share one memory, so each reads its own part of the gradients and they exchange what they saw.
    # On devices with a memory of their own, or of several processes, that exchange takes longer than reading all.
    bound = strategy.axes if strategy.num_replicas > 1 and strategy.transform != "jit" else ()
    one_process = len({device.process_index for device in strategy.devices}) == 1
    shares_memory = bool(bound) and one_process and strategy.devices[0].platform == "cpu"

    def plain(state: PyTree, batches: PyTree, others: PyTree) -> tuple[PyTree, tuple[PyTree, ...], FiniteFlags]:
        kinds, names, hidden = list[str](), list[str](), list[bool]()

        def as_written(state: PyTree, batches: PyTree, others: PyTree) -> tuple[PyTree, tuple[PyTree, ...], list[Any]]:
            state, residuals = ErrorFeedback.of(strategy, name, state)
            with tracing(ReplicaTrace(strategy, looks_at_parts=shares_memory, residuals=residuals)):
                new_state, outputs, flags = spec.apply(state, batches, others)
            kinds[:] = jax.tree.leaves(kinds_of(outputs, traced, rows_of(batches)))
            names[:], hidden[:] = flags.names, [flags.hidden]
            return (residuals.close(new_state) if residuals else new_state), outputs, flags.finite

        # Which metrics differ from replica to replica is seen in the traced step.
        arguments = state, batches, others
        closed, shapes = jax.make_jaxpr(as_written, return_shape=True)(*arguments)
        new_state, outputs, finite = jax.tree.unflatten(
            jax.tree.structure(shapes),
            graph.run(graph.forwarded(closed, collectives=True), jax.tree.leaves(arguments)),
        )
        if spec.compares_replicas and "state" in traced.returns:
            variables = graph.body_of(closed)
            places = jax.tree.unflatten(jax.tree.structure(arguments), variables.invars)
            old, own = jax.tree.leaves(places[0]), jax.tree.leaves(places[1])
            new = variables.outvars[: len(jax.tree.leaves(shapes[0]))]
            check_averages_combined(closed, old, new, own, shapes[0], (strategy.num_replicas, 1))
        rows = rows_of(batches) if bound else None  # of one replica nothing is averaged
        metrics = averaged_metrics(closed, shapes, jax.tree.structure(arguments), kinds, rows)
        with tracing(ReplicaTrace(strategy)):
            if shares_memory and finite:
                finite = list(jax.lax.pmin(jnp.stack(finite).astype(jnp.int32), strategy.axes) > 0)
            outputs = average(outputs, metrics)
        own = iter(kinds)
        outputs = jax.tree.map(lambda x: jnp.asarray(x)[None] if next(own) == LOCAL else x, outputs)
        return new_state, outputs, FiniteFlags(names, finite, hidden[0])

    def in_microbatches(
        state: PyTree, batches: PyTree, others: PyTree
    ) -> tuple[PyTree, tuple[PyTree, ...], FiniteFlags]:
        seen: list[FiniteFlags] = []
        state, residuals = ErrorFeedback.of(strategy, name, state)
        new_state, (*outputs, finite) = accumulated(
            strategy,
            spec.splittable(seen),
            options.accumulate,
            state,
            batches,
            others,
            residuals,
            compares_replicas=spec.compares_replicas,
        )
        return (
            (residuals.close(new_state) if residuals else new_state),
            tuple(outputs),
            FiniteFlags(seen[-1].names, finite, seen[-1].hidden),
        )

    run = plain if options.accumulate == 1 else in_microbatches

    def checked(state: PyTree, batches: PyTree, others: PyTree) -> tuple[PyTree, tuple[PyTree, ...], FiniteFlags]:
        new_state, outputs, flags = run(state, batches, others)
        if "state" not in traced.returns:
            return state, outputs, FiniteFlags([], [], hidden=False)
        return check_same_state(state, new_state), outputs, flags

    def once(token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        return guarded(checked, token, state, (batches, others), spec.policy, spec.watched, bound, spec.loss_scaling)

    def many(token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        def body(carry: Any, batches: PyTree) -> Any:
            before, old = carry
            token, state, outputs = once(before, old, batches, others)
            return (token, state), (outputs, was_left_out(before, token, old, state))

        (token, state), (outputs, left_out) = scan(strategy, body, (token[:2], state), batches)
        shapes = jax.eval_shape(once, token, state, jax.tree.map(lambda x: x[0], batches), others)[2]
        own = iter(jax.tree.leaves(kinds_of(shapes, traced)))  # of a replica's own results its axis leads
        outputs = jax.tree.map(lambda x: x.swapaxes(0, 1) if next(own) == LOCAL else x, outputs)
        return token_of_steps(token, left_out, token_size(options.steps_per_call)), state, outputs

    def to_learn_residuals(token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        first = batches if options.steps_per_call == 1 else jax.tree.map(lambda x: x[0], batches)
        state, outputs, _ = run(state, first, others)
        return token, state, outputs

    def whole_call(token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        if strategy.keeps_residuals and not has_residuals(state, name):  # traced for the shapes of its results alone
            return to_learn_residuals(token, state, batches, others)
        return (once if options.steps_per_call == 1 else many)(token, state, batches, others)

    return whole_call


def averaged_metrics(closed: Any, shapes: Any, arguments: Any, kinds: list[str], rows: int | None) -> list[bool]:
    """Which outputs of a traced step are metrics that differ from replica to replica.

    Args:
        closed: `(state, batches, others) -> (state, outputs, flags)`.
        shapes: what it returns.
        arguments: the tree of what it is given.
        kinds: of the outputs' leaves.
        rows: the number of rows of the batch.

    Raises:
        StepError: one of them has no mean.
    """
    new_state, outputs, _ = shapes
    jaxpr = graph.body_of(closed)
    state, batches, _ = jax.tree.unflatten(arguments, jaxpr.invars)
    residuals = jax.tree.leaves(residuals_of(state))
    varying = graph.varying(closed, [*jax.tree.leaves(batches), *residuals])
    first = len(jax.tree.leaves(new_state))
    found = [
        kind == METRIC and graph.is_in(v, varying)
        for v, kind in zip(jaxpr.outvars[first : first + len(kinds)], kinds, strict=True)
    ]
    check_means(outputs, found, rows)
    return found


def average(outputs: PyTree, which: list[bool]) -> PyTree:
    """Averages some of the outputs' leaves over the replicas, all in one all-reduce."""
    leaves, treedef = jax.tree.flatten(outputs)
    places = [i for i, is_mean in enumerate(which) if is_mean]
    if places and collectives.num_replicas() > 1:
        for i, leaf in zip(places, collectives.all_reduce([leaves[i] for i in places], "mean"), strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)
