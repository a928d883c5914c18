"""A step under a parameter server; called like the step, it schedules closures and returns at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdist.core.context import check_not_mixed
from jdist.core.remote import fetched
from jdist.core.step_state import pack, user_state, with_static_leaves
from jdist.core.strategy import Strategy
from jdist.data.batch_axis import rows_first
from jdist.data.batching import real_rows
from jdist.errors import BatchError, StepError, StrategyError
from jdist.ps.coordinator.dataset_pass import RemoteBatch
from jdist.ps.coordinator.datasets import spread
from jdist.ps.coordinator.remote_state import RemotePart, RemoteState
from jdist.ps.coordinator.remote_value import Pending, RemoteValue, leaf, stacked
from jdist.ps.coordinator.session import Session
from jdist.ps.program.artifact import taking_keys, with_shardings, without_keys
from jdist.ps.program.split_step import StepParts, take_apart
from jdist.ps.program.sync import Combined, SyncParts, Traced
from jdist.step import outputs as results
from jdist.step.base import Distributed
from jdist.step.call_errors import check_axis_bound
from jdist.step.options import StepOptions
from jdist.step.program_spec import ProgramSpec
from jdist.step.signature import Call, Signature, Step, is_same_state
from jdist.step.tree_checks import check_arrays, check_batch, check_not_traced, check_state, summary
from jdist.support.arrays import check_not_donated
from jdist.support.tracebacks import without_own_frames

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Given:
    """The arguments of a call that become a closure's.

    Attributes:
        shapes: of all of them.
        treedef: of `(batches, others)`.
        sent: the arrays that go with the closure.
        place: which of the arguments the worker reads itself: the first one, and how many.
        reads: the batch that they are.
    """

    shapes: list[Any]
    treedef: Any
    sent: list[Any]
    place: tuple[int, int] | None
    reads: RemoteBatch | None

    @classmethod
    def of(cls, batches: PyTree, others: PyTree) -> Given:
        """Sorts them."""
        leaves, treedef, place, reads = spread((batches, others))
        start, count = place or (0, 0)
        sent = [*leaves[:start], *leaves[start + count :]]
        check_arrays(jax.tree.unflatten(treedef, leaves)[0] if place is None else sent, "the batch")
        shapes = [jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x)) for x in leaves]
        return cls(shapes, treedef, sent, place, reads)


class PsStep(Distributed):
    """A step under a parameter server; `jdist.distribute` makes it.

    Attributes:
        strategy: the strategy it runs under.
        options: the options of `jdist.distribute`.
        last_state: the handle of the state that the newest call returned; None before the first.
    """

    def __init__(self, strategy: Strategy, job: Session, step: Step, options: StepOptions):
        self.__name__ = "the step"
        functools.update_wrapper(self, step)
        self.strategy, self.options = strategy, options
        self.last_state: PyTree = None
        self._left_out: RemoteValue | None = None
        self._job, self._step = job, with_static_leaves(step)
        self._signature = Signature(step, options, strategy)
        self._traced: dict[Any, tuple[Traced, results.Traced]] = {}
        self._adopted: tuple[PyTree, RemoteState] | None = None  # what was joined or brought there, and its handle

    @without_own_frames
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check_not_mixed(self.strategy)
        call, state, passed, others = self._signature.bind(args, kwargs)
        check_not_traced((state, passed, others))
        self._signature.check_not_donated(call, passed, others)
        turn = functools.partial(rows_first, axes=call.batch_axes, lead=int(self.options.steps_per_call > 1))
        batches, others = without_keys((turn(passed), others))
        if self.options.loss_scaling is not None:  # a worker puts its own in the place of this one
            others = others._replace(loss_scale=self.options.loss_scaling.begin().scale)
        state, parts = self._find(state)
        call, several = dataclasses.replace(call, parts=parts), self.options.steps_per_call > 1
        each = _unstacked(batches, self.options.steps_per_call) if several else [batches]
        given = [Given.of(one, others) for one in each]
        try:
            traced, told = self._trace(call, state, given[0])
        except NameError as exc:
            check_axis_bound(exc, self.strategy.name, self._job.on_worker)
            raise
        calls = [_values(traced, self._job.schedule(state, traced, one.sent, one.reads)) for one in given]
        values = [stacked(same) for same in zip(*calls, strict=True)] if several else calls[0]
        if traced.tells_finite:
            self._left_out = values.pop().map(lambda finite: np.pad(~np.atleast_1d(finite), (2, 0)).astype(np.int32))
        outputs = jax.tree.unflatten(traced.parts.outputs_treedef, values)
        states = _handles(state, parts)
        if "state" in told.returns:
            self.last_state = states[0] if len(states) == 1 else states
        return _result(states, outputs, told, passed, turn)

    def _find(self, state: PyTree) -> tuple[RemoteState, tuple[int, ...] | None]:
        """The handle of the state that the servers have, and which of its parts the step takes; None: all of it, as it is.

        Raises:
            StepError: the states are parts of different ones.
        """
        states = state if self.options.num_states > 1 else (state,)
        states = tuple(x.joined or x if isinstance(x, RemoteState) else x for x in states)
        parts = [x for x in states if isinstance(x, RemotePart)]
        if not parts:
            if len(states) == 1:
                return self.adopt(states[0]), None
            return self._join(states), tuple(range(len(states)))
        wholes = {id(part.whole) for part in parts}
        places = tuple(part.index for part in parts)
        if len(parts) < len(states) or len(wholes) > 1 or len(set(places)) < len(places):
            raise StepError(
                f"{self.__name__} was called with states of which some live on parameter servers with others that it was not "
                "given, or twice with one. Servers keep states that a step takes together as one: make them all by one "
                "`params, opt_state, ... = strategy.init(lambda: (params, opt_state, ...))`, and each step takes those that "
                "it needs."
            )
        return self.adopt(parts[0].whole), places

    def _join(self, states: tuple[PyTree, ...]) -> RemoteState:
        """One state on the servers of several that were made each by itself; their handles are parts of it from now on."""
        if self._adopted is None or not is_same_state(self._adopted[0], states):
            if len({id(x) for x in states if isinstance(x, RemoteState)}) < sum(
                isinstance(x, RemoteState) for x in states
            ):
                raise StepError(f"{self.__name__} was called with one state twice; each of its states is another.")
            for state in states:
                self._check_own(state)
                if not isinstance(state, RemoteState):
                    check_arrays(state, "the state")
            self._adopted = (
                states,
                RemoteState(self._job, jax.device_get(tuple(user_state(fetched(x)) for x in states))),
            )
            for state, part in zip(states, self._adopted[1].parts, strict=True):
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
        """A state's handle; of a tree of arrays one is made."""
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
        """The state as a call takes and returns it; nothing of the step is run."""
        _, state, _, _ = self._signature.bind(args, kwargs)
        states = _handles(*self._find(state))
        return states[0] if len(states) == 1 else states

    def wait(self) -> None:
        """Waits for every call.

        Raises:
            ClosureError: one of them failed; what was in the queue is cancelled.
        """
        self._job.join()

    @property
    def num_skipped(self) -> int:
        """How many steps `non_finite="skip"` has left out so far; waits for all."""
        return self._job.num_skipped() if self.options.non_finite == "skip" else 0

    def count_left_out(self, state: PyTree) -> RemoteValue | None:
        """See `Distributed`: which steps of the newest call were left out, from the third entry on; the count is not told."""
        return self._left_out

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Refused: there is no one program to lower.

        Raises:
            StepError: always.
        """
        raise StepError(
            f"{self.__name__}.lower: under a parameter server a step is several programs, on workers and servers. Lower it "
            "under `jdist.one_device()`: a worker's program is that step's without the update."
        )

    def _trace(self, call: Call, state: RemoteState, given: Given) -> tuple[Traced, results.Traced]:
        treedef, arguments = given.treedef, given.shapes
        key = (call, state.signature, treedef, given.place, tuple((x.shape, x.dtype) for x in arguments))
        if key not in self._traced:
            batches, others = jax.tree.unflatten(treedef, arguments)
            told = results.Traced(parts=call.parts)
            on_worker = self._job.on_worker
            spec = ProgramSpec(taking_keys(self._step), on_worker, self.options, call, told, [], self.__name__)
            scaling = self.options.loss_scaling
            self._check_rows(batches, 1)
            parts, n = take_apart(spec, state.shapes, batches, others), self._job.options.gradients_per_update
            updates = bool(parts.update.reads)
            loss_scale = (len(arguments) - 1, scaling.growth_interval) if scaling is not None and updates else None
            tells = updates and (spec.policy == "skip" or scaling is not None)
            if self._job.options.is_sync and updates:
                if given.reads is not None:
                    raise StepError(
                        "in synchronous mode the batch of an update is cut up among the workers, so it cannot be one that a "
                        "worker reads. Feed it by `strategy.distribute_dataset`."
                    )
                self._check_rows(batches, n)
                rows = len(jax.tree.leaves(batches))
                parts = take_apart(spec, state.shapes, batches, others, closures=n)
                sync = SyncParts(parts, n, treedef, arguments, rows)
                made = Traced(
                    parts,
                    sync.worker,
                    sync.arguments,
                    sync.reported,
                    spec.policy,
                    sync,
                    loss_scale=loss_scale,
                    tells_finite=tells,
                )
            else:
                worker = functools.partial(_worker, parts, treedef, tells)
                arguments = with_shardings(on_worker.mesh, arguments, len(jax.tree.leaves(batches)))
                inputs = [parts.update.shapes[i] for i in parts.read]
                returned = jax.eval_shape(worker, [*inputs, *arguments])
                outputs = returned[len(returned) - parts.outputs_treedef.num_leaves - tells :]
                made = Traced(
                    parts,
                    worker,
                    arguments,
                    outputs,
                    spec.policy,
                    batch=given.place,
                    loss_scale=loss_scale,
                    tells_finite=tells,
                )
            self._traced[key] = made, told
        return self._traced[key]

    def _check_rows(self, batches: PyTree, workers: int) -> None:
        k, devices = self.options.accumulate, self._job.on_worker.num_replicas
        explanation = f"{workers} workers' gradients in an update" if workers > 1 else f"{devices} devices of a worker"
        batches = batches[0] if isinstance(batches, tuple) and len(batches) == 1 else batches
        batches = jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), batches)  # shapes alone count
        check_batch(batches, parts=workers * devices, explanation=explanation, accumulate=k)

    def __repr__(self) -> str:
        return f"<{self.__name__} distributed by {self.strategy!r}>"


def _unstacked(batches: PyTree, most: int) -> list[PyTree]:
    """The batches of each step of a call; the last call of a pass may have fewer than `most`."""
    leaves = jax.tree.leaves(batches)
    if any(isinstance(leaf, RemoteBatch) for leaf in leaves):
        raise StepError(
            "`steps_per_call` is for batches that the program feeds. A call of a step whose batch a worker reads returns at "
            "once anyway: leave it at 1."
        )
    counts = {np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in leaves}
    if len(counts) != 1 or not 1 <= max(counts) <= most:
        raise BatchError(
            f"the step was made with steps_per_call={most}, and its batch has {summary(batches)}; each leaf needs a leading "
            f"axis of 1 to {most} steps, the same for all. Pass the same `steps_per_call` to `jdist.distribute` and to "
            "`strategy.distribute_dataset`."
        )
    return [jax.tree.map(lambda x, i=i: np.asarray(x)[i], batches) for i in range(max(counts))]


def _values(traced: Traced, pending: Sequence[Pending]) -> list[RemoteValue]:
    """What a call returns, leaf by leaf; last, where `tells_finite`, whether its gradients were finite."""
    count = traced.parts.outputs_treedef.num_leaves
    if traced.sync is None:
        return [RemoteValue(pending, leaf(i), struct=struct) for i, struct in enumerate(traced.outputs)]
    sync, together = traced.sync, list[Combined]()

    def combined(found: list[list[Any]]) -> Combined:
        if not together:  # by whom it is asked for first, for all
            together.append(sync.combine(found))
        return together[0]

    def read(i: int, found: list[list[Any]]) -> Any:
        return combined(found).outputs[i]

    values = [RemoteValue(pending, functools.partial(read, i)) for i in range(count)]
    if traced.tells_finite:
        values.append(RemoteValue(pending, lambda found: np.bool_(combined(found).finite)))
    return values


def _worker(parts: StepParts, treedef: Any, tells_finite: bool, values: Sequence[Any]) -> list[Any]:
    """A step's worker function, of a flat list: of a step that updates nothing the outputs alone."""
    n = len(parts.read)
    pushed, scalars, finite, outputs = parts.worker(values[:n], *jax.tree.unflatten(treedef, values[n:]))
    told = [finite] if tells_finite else []
    return [*pushed, *scalars, finite, *outputs, *told] if parts.update.reads else list(outputs)


def _handles(state: RemoteState, parts: tuple[int, ...] | None) -> tuple[RemoteState | RemotePart, ...]:
    """Of the states that a step takes."""
    return (state,) if parts is None else tuple(state.parts[i] for i in parts)


def _result(
    states: Sequence[Any],
    outputs: tuple[PyTree, ...],
    traced: results.Traced,
    batches: PyTree,
    turn: Callable[[PyTree], PyTree],
) -> Any:
    if "examples" in traced.returns:
        found = (real_rows(batch, lambda _, i=i: turn(batches)[i]) for i, batch in enumerate(batches))
        real = next((rows for rows in found if rows is not None), None)
        outputs = tuple(
            jax.tree.map(lambda x: x.map(lambda rows: rows[real]), tree)
            if role == "examples" and real is not None
            else tree
            for role, tree in zip(traced.output_roles, outputs, strict=True)
        )
    outputs = traced.in_places(states, outputs)
    return outputs[0] if traced.bare else outputs
