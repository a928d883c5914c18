"""A step under a parameter server: a call schedules closures and returns at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdist.core.context import check_not_mixed, is_foreign, own_settings
from jdist.core.remote import fetched
from jdist.core.step_state import pack, user_state, with_static_leaves
from jdist.core.strategy import Strategy
from jdist.data.batch_axis import rows_first
from jdist.data.batching import real_rows
from jdist.errors import BatchError, StepError, StrategyError
from jdist.ps.coordinator.datasets import Arguments, RemoteBatch, flatten
from jdist.ps.coordinator.remote_state import RemotePart, RemoteState
from jdist.ps.coordinator.remote_value import Pending, RemoteValue, leaf, stacked
from jdist.ps.coordinator.session import Session
from jdist.ps.program.artifact import taking_keys, without_keys
from jdist.ps.program.function_plan import StepFunction, make_function
from jdist.ps.program.split_step import split_step
from jdist.ps.program.sync import make_sync_function
from jdist.step.base import Distributed
from jdist.step.call_errors import check_axis_bound
from jdist.step.options import StepOptions
from jdist.step.outputs import Traced
from jdist.step.program_spec import ProgramSpec
from jdist.step.signature import Call, Signature, Step, is_same_state
from jdist.step.tree_checks import check_arrays, check_batch, check_not_traced, check_state, summary
from jdist.support.arrays import check_not_donated
from jdist.support.tracebacks import without_own_frames
from jdist.typing import PyTree


class PsStep(Distributed):
    """A step under a parameter server; `jdist.distribute` makes it."""

    def __init__(self, strategy: Strategy, job: Session, step: Step, options: StepOptions):
        self.__name__ = "the step"
        functools.update_wrapper(self, step)
        self.strategy, self.options = strategy, options
        self.last_state: PyTree = None
        self._left_out: RemoteValue | None = None
        self._job, self._step = job, with_static_leaves(step)
        self._signature = Signature(step, options, strategy)
        self._functions: dict[Any, StepFunction] = {}
        self._adopted: tuple[PyTree, RemoteState] | None = (
            None  # the state or states passed in, and the handle made for them
        )

    @without_own_frames
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check_not_mixed(self.strategy)
        if is_foreign(self.strategy):
            with own_settings(self.strategy):
                return self(*args, **kwargs)
        call, state, passed, others = self._signature.bind(args, kwargs)
        check_not_traced((state, passed, others))
        self._signature.check_not_donated(call, passed, others)
        turn = functools.partial(rows_first, axes=call.batch_axes, lead=self.options.num_step_axes)
        batches, others = without_keys((turn(passed), others))
        if self.options.loss_scaling is not None:  # a worker puts its own in place of this one
            others = others._replace(loss_scale=self.options.loss_scaling.begin().scale)
        state, parts = self._find(state)
        call, several = dataclasses.replace(call, parts=parts), self.options.steps_per_call > 1
        each = _unstacked(batches, self.options.steps_per_call) if several else [batches]
        arguments = [_arguments(one, others) for one in each]
        try:
            function = self._function(call, state, arguments[0])
        except NameError as exc:
            check_axis_bound(exc, self.strategy.name, self._job.on_worker)
            raise
        calls = [_values(function, self._job.schedule(state, function, one.sent, one.reads)) for one in arguments]
        values = [stacked(same) for same in zip(*calls, strict=True)] if several else calls[0]
        if function.step.reports_finite:
            self._left_out = values.pop().map(lambda finite: np.pad(~np.atleast_1d(finite), (2, 0)).astype(np.int32))
        outputs = jax.tree.unflatten(function.step.outputs_treedef, values)
        states, traced = _handles(state, parts), function.step.spec.traced
        if "state" in traced.returns:
            self.last_state = states[0] if len(states) == 1 else states
        return _result(states, outputs, traced, passed, turn)

    def _find(self, state: PyTree) -> tuple[RemoteState, tuple[int, ...] | None]:
        """Finds the handle of the state on the servers, and the step's parts of it; None: all."""
        states = state if self.options.num_states > 1 else (state,)
        states = tuple(x.joined or x if isinstance(x, RemoteState) else x for x in states)
        parts = [x for x in states if isinstance(x, RemotePart)]
        if not parts:
            if len(states) == 1:
                return self.adopt(states[0]), None
            return self._merge(states), tuple(range(len(states)))
        wholes = {id(part.whole) for part in parts}
        places = tuple(part.index for part in parts)
        if len(parts) < len(states) or len(wholes) > 1 or len(set(places)) < len(places):
            raise StepError(
                f"{self.__name__} was called with one state twice, or with states that were not made together. "
                "Servers keep states that a step takes together as one: make them all by one "
                "`params, opt_state, ... = strategy.init(lambda: (params, opt_state, ...))`, and each step takes those that "
                "it needs."
            )
        return self.adopt(parts[0].whole), places

    def _merge(self, states: tuple[PyTree, ...]) -> RemoteState:
        """Merges states that were made separately into one on the servers; from now on their handles are parts of it."""
        if self._adopted is None or not is_same_state(self._adopted[0], states):
            remote = [id(x) for x in states if isinstance(x, RemoteState)]
            if len(set(remote)) < len(remote):
                raise StepError(f"{self.__name__} was called with one state twice; pass a different state for each.")
            for state in states:
                self._check_own(state)
                if not isinstance(state, RemoteState):
                    check_arrays(state, "the state")
            joined = RemoteState(self._job, jax.device_get(tuple(user_state(fetched(x)) for x in states)))
            self._adopted = states, joined
            for state, part in zip(states, joined.parts, strict=True):
                if isinstance(state, RemoteState):
                    state.joined = part
        return self._adopted[1]

    def _check_own(self, state: PyTree) -> None:
        if isinstance(state, RemoteState) and state.job is not self._job:
            raise StrategyError(
                f"{self.__name__} was called with a state that lives on the parameter servers of another strategy. Take "
                "it from there: `state = strategy.init(lambda: other.fetch(state))`."
            )

    def adopt(self, state: PyTree) -> RemoteState:
        """Returns a state's handle; of a tree of arrays it makes one."""
        self._check_own(state)
        if isinstance(state, RemoteState):
            return state
        if self._adopted is None or self._adopted[0] is not state:
            check_not_donated(state)
            packed = pack(state)
            check_state(packed)
            self._adopted = state, RemoteState(self._job, jax.device_get(user_state(packed)))
        return self._adopted[1]

    def prepare(self, *args: Any, **kwargs: Any) -> PyTree:
        """Makes the state that a call takes and returns; nothing of the step is run."""
        _, state, _, _ = self._signature.bind(args, kwargs)
        states = _handles(*self._find(state))
        return states[0] if len(states) == 1 else states

    def wait(self) -> None:
        """Waits for every call; raises if one failed. The error cancels the queue."""
        self._job.join()

    @property
    def num_skipped(self) -> int:
        """Counts the steps that `non_finite="skip"` has left out so far; waits for all."""
        return self._job.num_skipped() if self.options.non_finite == "skip" else 0

    def count_left_out(self, state: PyTree) -> RemoteValue | None:
        """See `Distributed`; which steps of the newest call were left out, from the third entry on. The count itself is 0."""
        return self._left_out

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Refuses: a step is more than one program."""
        raise StepError(
            f"{self.__name__}.lower: under a parameter server a step is several programs, on workers and servers. Lower it "
            "under `jdist.one_device()`: a worker's program is that step's without the update."
        )

    def _function(self, call: Call, state: RemoteState, arguments: Arguments) -> StepFunction:
        """Makes what workers compute of the step in calls of this form; traced once."""
        key = (call, state.signature, arguments.treedef, arguments.place, arguments.forms)
        if key not in self._functions:
            batches, others = jax.tree.unflatten(arguments.treedef, arguments.shapes)
            spec = ProgramSpec(
                taking_keys(self._step),
                self._job.on_worker,
                self.options,
                call,
                Traced(parts=call.parts),
                [],
                self.__name__,
            )
            self._check_rows(batches, 1)
            step = split_step(spec, state.shapes, batches, others)
            rounds = self._job.options.rounds
            if rounds is not None and step.updates:
                if arguments.reads is not None:
                    raise StepError(
                        "in synchronous mode no worker reads a whole batch; feed batches by `strategy.distribute_dataset`."
                    )
                self._check_rows(batches, rounds.size)
                step = split_step(spec, state.shapes, batches, others, closures=rounds.size)
                self._functions[key] = make_sync_function(step, rounds.size)
            else:
                self._functions[key] = make_function(step, arguments.place)
            step.plan.notice(self.__name__)
        return self._functions[key]

    def _check_rows(self, batches: PyTree, workers: int) -> None:
        k, devices = self.options.accumulate, self._job.on_worker.num_replicas
        explanation = f"{workers} workers' gradients in an update" if workers > 1 else f"{devices} devices of a worker"
        batches = batches[0] if isinstance(batches, tuple) and len(batches) == 1 else batches
        batches = jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), batches)  # shapes alone count
        check_batch(batches, parts=workers * devices, explanation=explanation, accumulate=k)

    def __repr__(self) -> str:
        return f"<{self.__name__} distributed by {self.strategy!r}>"


def _arguments(batches: PyTree, others: PyTree) -> Arguments:
    arguments = flatten((batches, others))
    given = jax.tree.unflatten(arguments.treedef, arguments.leaves)[0] if arguments.place is None else arguments.sent
    check_arrays(given, "the batch")
    return arguments


def _unstacked(batches: PyTree, most: int) -> list[PyTree]:
    """Takes the batches of a call's steps apart; the last call of a pass may have fewer than `most`."""
    leaves = jax.tree.leaves(batches)
    if any(isinstance(leaf, RemoteBatch) for leaf in leaves):
        raise StepError(
            "`steps_per_call` is for batches that the program feeds; leave it at 1 for a batch that a worker reads."
        )
    counts = {np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in leaves}
    if len(counts) != 1 or not 1 <= max(counts) <= most:
        raise BatchError(
            f"the step was made with steps_per_call={most}, and its batch has {summary(batches)}; each leaf needs a leading "
            f"axis of 1 to {most} steps, the same for all. Pass the same `steps_per_call` to `jdist.distribute` and to "
            "`strategy.distribute_dataset`."
        )
    return [jax.tree.map(lambda x, i=i: np.asarray(x)[i], batches) for i in range(max(counts))]


def _values(function: StepFunction, pending: Sequence[Pending]) -> list[RemoteValue]:
    """Makes the values that a call returns; last, where it `reports_finite`, whether its gradients were finite."""
    if function.combine is None:
        return [RemoteValue(pending, leaf(i), struct=struct) for i, struct in enumerate(function.outputs)]
    combine, results = function.combine, list[list[Any]]()

    def read(i: int, reported: list[list[Any]]) -> Any:
        if not results:  # whoever reads first combines for all
            _, finite, outputs = combine(reported)
            results.append([*outputs, np.bool_(finite)])
        return results[0][i]

    count = function.step.outputs_treedef.num_leaves + function.step.reports_finite
    return [RemoteValue(pending, functools.partial(read, i)) for i in range(count)]


def _handles(state: RemoteState, parts: tuple[int, ...] | None) -> tuple[RemoteState | RemotePart, ...]:
    """Returns the handles of the states that a step takes."""
    return (state,) if parts is None else tuple(state.parts[i] for i in parts)


def _result(
    states: Sequence[Any],
    outputs: tuple[PyTree, ...],
    traced: Traced,
    batches: PyTree,
    turn: Callable[[PyTree], PyTree],
) -> Any:
    """Puts states and outputs in the places where the step returns them, and drops the rows of padding."""
    if "examples" in traced.returns:
        of_each = (real_rows(batch, lambda _, i=i: turn(batches)[i]) for i, batch in enumerate(batches))
        real = next((rows for rows in of_each if rows is not None), None)
        outputs = tuple(
            jax.tree.map(lambda x: x.map(lambda rows: rows[real]), tree)
            if role == "examples" and real is not None
            else tree
            for role, tree in zip(traced.output_roles, outputs, strict=True)
        )
    outputs = traced.in_places(states, outputs)
    return outputs[0] if traced.bare else outputs
