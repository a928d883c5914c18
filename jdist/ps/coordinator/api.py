"""`strategy.coordinator`: schedules any pure function on the workers of a parameter server."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jdist.core.context import plain_jax
from jdist.core.strategy import Strategy
from jdist.errors import StepError, StrategyError
from jdist.ps.coordinator.datasets import WorkerDataset, flatten
from jdist.ps.coordinator.remote_value import RemoteValue, leaf
from jdist.ps.coordinator.session import Session
from jdist.ps.program.artifact import pack, sent_of, taking_keys, without_keys
from jdist.ps.program.function_plan import FunctionPlan
from jdist.ps.protocol.wire import spec_of
from jdist.step.tree_checks import check_arrays
from jdist.support.arrays import is_key
from jdist.typing import PyTree

_INDEX: contextvars.ContextVar[Any] = contextvars.ContextVar("worker_index", default=None)


def worker_index() -> jax.Array:
    """Returns the number of the worker that computes, inside a function that `strategy.coordinator.schedule` was given.

    Returns:
        An int32 scalar, from 0.

    Raises:
        StepError: it was called elsewhere.

    Source: `tf.distribute.coordinator.experimental_get_current_worker_index`.
    """
    index = _INDEX.get()
    if index is None:
        raise StepError(
            "`jdist.ps.worker_index()` is known only in a function that was given to `strategy.coordinator.schedule`."
        )
    return index


class ClusterCoordinator:
    """Schedules pure functions on the workers, with or without steps.

    Each function runs on one worker, whichever is free; one that was lost with its worker runs again on another, so it may
    run more than once, and its result is there once.

    Source: `tf.distribute.coordinator.ClusterCoordinator`.
    """

    def __init__(self, job: Session):
        if isinstance(job, Strategy):
            raise StrategyError("`jdist.ps.ClusterCoordinator` is made with its strategy: take `strategy.coordinator`.")
        self._job = job
        self._traced: dict[Any, _TracedFunction] = {}

    def schedule(
        self, fn: Callable[..., PyTree], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> PyTree:
        """Puts a call of a function into the queue, and returns at once unless the queue is full (262,144 calls or 512 MiB).

        Args:
            fn: a pure function of trees of arrays, returning one. It is traced here, once for each form of its arguments, and
                compiled once on each worker; pass the same function object again rather than a new lambda.
            args: its arguments; in place of an array there may be a `RemoteValue`, also one that is still to come, and in
                the place of a tree one batch of a `create_per_worker_dataset`, which the worker then reads.
            kwargs: its keyword arguments.

        Returns:
            The tree that `fn` returns, with a `RemoteValue` for each array.

        Raises:
            ClosureError: a function that was scheduled before has failed. What was in the queue is cancelled, nothing is left
                running, and the next call starts over.
            StepError: an argument or a result is not an array.
            ArtifactError: the function calls the host (a print, a callback), which cannot be sent to workers.
        """
        arguments = flatten(without_keys((tuple(args), dict(kwargs or {}))))
        check_arrays([x for x in arguments.sent if not isinstance(x, RemoteValue)], "the arguments")
        key = fn, arguments.treedef, arguments.forms, arguments.place
        if key not in self._traced:
            with plain_jax():
                self._traced[key] = _TracedFunction(fn, arguments.treedef, arguments.shapes, arguments.place)
        traced = self._traced[key]
        pending = self._job.schedule_function(traced, traced.plan, arguments.sent, arguments.reads)
        values = [RemoteValue([pending], leaf(i), struct=struct) for i, struct in enumerate(traced.outputs)]
        return jax.tree.unflatten(traced.outputs_treedef, values)

    def create_per_worker_dataset(
        self,
        fn: Callable[..., Any] | str,
        *,
        partial: Literal["pad", "drop", "error"] = "pad",
        with_mask: bool = False,
        prefetch: int = 2,
    ) -> WorkerDataset:
        """Makes a dataset; each worker reads its own share.

        Args:
            fn: from a `jdist.InputContext` to a source of batches; called on each worker, which has to find it: a function at
                the top of a module, its name "package.module:function", or a function of the script that workers were
                started with (`jdist serve --script`; workers of this machine have it).
            partial: what to do with a batch that is shorter than the first, as for `strategy.distribute_dataset`.
            with_mask: as there.
            prefetch: batches that a worker makes ahead.

        Returns:
            An iterable of batches, each for one call of `schedule` or of a step.

        Raises:
            DatasetError: workers cannot find `fn`, or it failed there.
        """
        return self._job.dataset(fn, {"partial": partial, "with_mask": with_mask, "prefetch": prefetch})

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until everything that was scheduled is done.

        Args:
            timeout_s: seconds to wait; None: as long as it takes.

        Raises:
            TimeoutError: it was not in time.
            ClosureError: something failed.
        """
        self._job.join(timeout_s)

    @property
    def done(self) -> bool:
        """Returns whether everything that was scheduled is done."""
        return self._job.done

    @property
    def num_workers(self) -> int:
        """Returns the number of workers."""
        return len(self._job.servers.workers)

    @property
    def local_workers(self) -> tuple[int, ...]:
        """Process ids of the workers of this machine that run now; empty on a cluster. One that has ended is started again."""
        return self._job.servers.running_workers()

    def describe(self) -> str:
        """Says where the strategy runs, in a few words; starts nothing."""
        return self._job.describe()

    def fetch(self, tree: PyTree) -> PyTree:
        """Replaces each `RemoteValue` in `tree` by its array; waits for them.

        Raises:
            ClosureError: one of them failed, or was cancelled.
        """
        return jax.tree.map(lambda x: x.result() if isinstance(x, RemoteValue) else x, tree)

    def close(self) -> None:
        """Ends the connections, and the processes that the strategy has started; done by itself at the program's end.

        A state that is on the servers is lost, unless it was fetched.
        """
        self._job.close()


class _TracedFunction:
    """A function, traced for arguments of one form."""

    def __init__(self, fn: Callable[..., PyTree], treedef: Any, shapes: Sequence[Any], place: tuple[int, int] | None):
        self._fn, self._treedef, self._place = taking_keys(fn), treedef, place
        self._arguments = [jax.ShapeDtypeStruct((), np.int32), *shapes]
        outputs = jax.eval_shape(self._checked, self._arguments)
        self.outputs, self.outputs_treedef = jax.tree.flatten(outputs)

    def plan(self) -> tuple[FunctionPlan, bytes]:
        """Returns the function's plan, and the function, packed."""
        plan = FunctionPlan(
            arguments=tuple(map(spec_of, sent_of(self._arguments[1:], self._place))),
            outputs=tuple(map(spec_of, self.outputs)),
            batch=self._place,
            takes_index=True,
        )
        with plain_jax():
            return plan, pack(lambda values: jax.tree.leaves(self._call(values)), self._arguments)

    def _checked(self, values: list[Any]) -> PyTree:
        outputs = self._call(values)
        name = getattr(self._fn, "__name__", "the function")
        check_arrays(outputs, f"the result of {name}")
        if any(map(is_key, jax.tree.leaves(outputs))):
            raise StepError(f"the result of {name} has a PRNG key; return `jax.random.key_data(key)`.")
        return outputs

    def _call(self, values: list[Any]) -> PyTree:
        args, kwargs = jax.tree.unflatten(self._treedef, values[1:])
        token = _INDEX.set(values[0])
        try:
            return self._fn(*args, **kwargs)
        finally:
            _INDEX.reset(token)
