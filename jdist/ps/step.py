"""A step under a parameter server; called like the step, it schedules closures and returns at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdist.context import check_not_mixed
from jdist.data.padding import real_rows
from jdist.errors import StepError
from jdist.ps.program import StepParts, take_apart
from jdist.ps.remote_state import RemoteState
from jdist.ps.remote_value import Pending, RemoteValue, leaf, stacked
from jdist.ps.running import PsJob, Traced
from jdist.ps.sync_program import Combined, SyncParts, check_rows
from jdist.strategy import Strategy
from jdist.transforms import results
from jdist.transforms.calls import Call, Signature, Step
from jdist.transforms.guard import Watched
from jdist.transforms.options import StepOptions
from jdist.transforms.replica_step import ProgramSpec
from jdist.transforms.trees import check_arrays, check_not_traced

PyTree = Any


class PsStep:
    """A step under a parameter server; `jdist.distribute` makes it.

    Attributes:
        strategy: the strategy it runs under.
        options: the options of `jdist.distribute`.
        last_state: the handle of the state that the newest call returned; None before the first.
    """

    def __init__(self, strategy: Strategy, on_worker: Strategy, job: PsJob, step: Step, options: StepOptions):
        self.__name__ = "the step"
        functools.update_wrapper(self, step)
        self.strategy, self.options = strategy, options
        self.last_state: PyTree = None
        self._on_worker, self._job, self._step = on_worker, job, step
        self._signature = Signature(step, options)
        self._traced: dict[Any, tuple[Traced, results.Traced]] = {}
        self._adopted: tuple[PyTree, RemoteState] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check_not_mixed(self.strategy)
        call, state, batches, others = self._signature.bind(args, kwargs)
        check_not_traced((state, batches, others))
        state, k = self.adopt(state), self.options.steps_per_call
        check_arrays(batches, "the batch")
        each = [batches] if k == 1 else [jax.tree.map(lambda x, i=i: np.asarray(x)[i], batches) for i in range(k)]
        traced, told = self._trace(call, state, each[0], others)
        calls = [_values(traced, self._job.schedule(state, traced, jax.tree.leaves((one, others)))) for one in each]
        values = calls[0] if k == 1 else [stacked(same) for same in zip(*calls, strict=True)]
        outputs = jax.tree.unflatten(traced.parts.outputs_treedef, values)
        if "state" in told.returns:
            self.last_state = state
        return _result(state, outputs, told, batches)

    def adopt(self, state: PyTree) -> RemoteState:
        """A state's handle; of a tree of arrays one is made."""
        if isinstance(state, RemoteState):
            return state
        if self._adopted is None or self._adopted[0] is not state:
            check_arrays(state, "the state")
            self._adopted = state, RemoteState(self._job, jax.device_get(state))
        return self._adopted[1]

    def prepare(self, *args: Any, **kwargs: Any) -> PyTree:
        """The state as a call takes and returns it; nothing of the step is run."""
        _, state, _, _ = self._signature.bind(args, kwargs)
        return self.adopt(state)

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

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Refused: there is no one program to lower.

        Raises:
            StepError: always.
        """
        raise StepError(
            f"{self.__name__}.lower: under a parameter server a step is several programs, on workers and servers. Lower it "
            "under `jdist.one_device()`: a worker's program is that step's without the update."
        )

    def _trace(self, call: Call, state: RemoteState, batches: PyTree, others: PyTree) -> tuple[Traced, results.Traced]:
        leaves, treedef = jax.tree.flatten((batches, others))
        shapes = tuple((np.shape(x), jax.dtypes.result_type(x)) for x in leaves)
        key = (call, state.signature, treedef, shapes)
        if key not in self._traced:
            told = results.Traced()
            spec = ProgramSpec(self._step, self._on_worker, self.options, call, told, Watched(), self.__name__)
            arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
            parts, n = take_apart(spec, state.shapes, batches, others), self._job.gradients_per_update
            if self._job.options.is_sync and parts.update.reads:
                rows = len(jax.tree.leaves(batches))
                check_rows(arguments[:rows], n, self.options.accumulate)
                parts = take_apart(spec, state.shapes, batches, others, closures=n)
                sync = SyncParts(parts, n, treedef, arguments, rows)
                made = Traced(parts, sync.worker, sync.arguments, sync.reported, spec.policy, sync)
            else:
                worker = functools.partial(_worker, parts, treedef)
                inputs = [parts.update.shapes[i] for i in parts.read]
                returned = jax.eval_shape(worker, [*inputs, *arguments])
                outputs = returned[len(returned) - parts.outputs_treedef.num_leaves :]
                made = Traced(parts, worker, arguments, outputs, spec.policy)
            self._traced[key] = made, told
        return self._traced[key]

    def __repr__(self) -> str:
        return f"<{self.__name__} distributed by {self.strategy!r}>"


def _values(traced: Traced, pending: Sequence[Pending]) -> list[RemoteValue]:
    """What a call returns, leaf by leaf."""
    count = traced.parts.outputs_treedef.num_leaves
    if traced.sync is None:
        return [RemoteValue(pending, leaf(i), struct=traced.outputs[i]) for i in range(count)]
    sync, combined = traced.sync, list[Combined]()

    def read(i: int, found: list[list[Any]]) -> Any:
        if not combined:  # by whom it is asked for first, for all
            combined.append(sync.combine(found))
        return combined[0].outputs[i]

    return [RemoteValue(pending, functools.partial(read, i)) for i in range(count)]


def _worker(parts: StepParts, treedef: Any, values: Sequence[Any]) -> list[Any]:
    """A step's worker function, of a flat list: of a step that updates nothing the outputs alone."""
    n = len(parts.read)
    pushed, scalars, finite, outputs = parts.worker(values[:n], *jax.tree.unflatten(treedef, values[n:]))
    return [*pushed, *scalars, finite, *outputs] if parts.update.reads else list(outputs)


def _result(state: RemoteState, outputs: tuple[PyTree, ...], traced: results.Traced, batches: PyTree) -> Any:
    if "examples" in traced.returns:
        real = next((rows for batch in batches if (rows := real_rows(batch)) is not None), None)
        outputs = tuple(
            jax.tree.map(lambda x: x.map(lambda rows: rows[real]), tree)
            if role == "examples" and real is not None
            else tree
            for role, tree in zip(traced.output_roles, outputs, strict=True)
        )
    if "state" in traced.returns:
        i = traced.returns.index("state")
        outputs = (*outputs[:i], state, *outputs[i:])
    return outputs[0] if traced.bare else outputs
