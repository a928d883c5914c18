"""The parts of a step's program, and the types of the functions that make it up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jdist.core.context import ReplicaTrace, current_trace, tracing
from jdist.core.precision import LossScaling
from jdist.core.step_state import loss_scale_of, user_state, with_user_state
from jdist.core.strategy import Strategy
from jdist.step.options import NonFinite, StepOptions
from jdist.step.outputs import METRIC, OutputKind, Traced, differs, kinds_of, rows_of, sort_results
from jdist.step.signature import Call, Others, Step
from jdist.step.tree_checks import check_state
from jdist.typing import PyTree


@dataclass(frozen=True)
class FiniteFlags:
    """The flags of one step: whether its gradients are finite."""

    names: list[str]  # of each gradient and loss at the step's own level
    finite: list[jax.Array]  # bool scalars
    # some gradients are at an inner level (in a `lax.scan`), where flags cannot be seen
    hidden: bool

    @classmethod
    def of(cls, trace: ReplicaTrace) -> FiniteFlags:
        """Takes the flags that a trace has gathered."""
        return cls([name for name, _ in trace.finite], [flag for _, flag in trace.finite], bool(trace.hidden))


# One step over one replica's rows: (state, batches, others) -> (state, outputs, flags of its gradients)
RunFn = Callable[[PyTree, PyTree, Others], tuple[PyTree, tuple[PyTree, ...], FiniteFlags]]
# What a replica runs in one call: (token, state, batches, others) -> (token, state, outputs); for the token see `non_finite`
StepFn = Callable[[jax.Array, PyTree, PyTree, Others], tuple[jax.Array, PyTree, tuple[PyTree, ...]]]
# A step to be split: (state, batches, others) -> (state, outputs, kinds of the outputs' leaves)
Pure = Callable[[PyTree, PyTree, Any], tuple[PyTree, PyTree, list[OutputKind]]]


@dataclass(frozen=True)
class ProgramSpec:
    """The parts of a program."""

    step: Step
    strategy: Strategy
    options: StepOptions
    call: Call
    traced: Traced  # filled in while tracing
    # the values that the programs check; a token's code is an index into it, from 1
    flag_names: list[str]
    name: str  # the step's, under which a state keeps its residuals

    @property
    def compares_replicas(self) -> bool:
        """Returns whether the state must be the same on all replicas, which see rows of their own."""
        return bool(self.strategy.bound_axes and self.options.may_update_state and self.options.check_replicas)

    @property
    def policy(self) -> NonFinite:
        """The effect of a non-finite gradient: none on a step that updates nothing."""
        return self.options.non_finite if self.options.may_update_state else "apply"

    @property
    def loss_scaling(self) -> LossScaling | None:
        """Moves the loss scale in the state; None: the state has none, or it stays."""
        return self.options.loss_scaling if self.options.may_update_state else None

    def apply(self, state: PyTree, batches: PyTree, others: Others) -> tuple[PyTree, tuple[PyTree, ...], FiniteFlags]:
        """Calls the step under the current trace: the new state, the outputs by role, what was seen of the gradients."""
        trace = current_trace()
        assert trace is not None  # every caller traces under one
        user, precision = user_state(state), self.options.precision
        if precision is not None:
            precision.check_names((user, batches))
            batches = precision.cast_to_compute(batches)
        # Copies of the containers: what a step changes in place must not change for the caller.
        argument, batches, others = jax.tree.map(lambda x: x, (user, batches, others))
        with tracing(dataclasses.replace(trace, precision=precision, loss_scale=self._loss_scale(state, others))):
            results = self.call.apply(self.step, argument, batches, others)
            new_state, outputs = sort_results(results, user, self.options, self.traced)
            check_state(new_state, "the state that the step returned")
            if self.options.may_update_state:
                self.traced.changes_state |= differs(jax.tree.leaves(user), jax.tree.leaves(new_state))
        if precision is not None:
            outputs = jax.tree.map(precision.cast_to_output, outputs)
        return with_user_state(state, new_state), outputs, FiniteFlags.of(trace)

    def _loss_scale(self, state: PyTree, others: Others) -> Any:
        """Finds the factor of losses, if any: in the state, or where a parameter server's worker puts it."""
        if self.options.loss_scaling is None:
            return None
        loss_scale = loss_scale_of(state)
        return others.loss_scale if loss_scale is None else loss_scale.scale

    def splittable(self, seen: list[FiniteFlags]) -> Pure:
        """Makes the step that `microbatches.make_plan` takes, with flags after the outputs; notes their names in `seen`."""

        def pure(state: PyTree, batches: PyTree, others: Others) -> tuple[PyTree, Any, list[OutputKind]]:
            new_state, outputs, flags = self.apply(state, batches, others)
            seen.append(dataclasses.replace(flags, finite=[]))  # no tracer may outlive its trace
            # Flags are made of combined gradients: like a metric that is the same on all replicas.
            kinds = [*jax.tree.leaves(kinds_of(outputs, self.traced, rows_of(batches))), *[METRIC] * len(flags.finite)]
            return new_state, (*outputs, flags.finite), kinds

        return pure
