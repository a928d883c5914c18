"""Results of closures that are still to come."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

Read = Callable[[list[list[Any]]], Any]
_CALLS = threading.local()


class Pending:
    """The results of one closure; they come again if a rollback discarded their state."""

    def __init__(self, cancel: Callable[[Sequence[Pending]], bool] | None = None):
        # None while the closure waits for its arguments.
        self.number: int | None = None
        self._cancel = cancel
        # Whether the results, or the error, have arrived; `was_there` stays true after a rollback discards them.
        self.done = self.was_there = False
        self._woken: threading.Event | None = None  # made for the first who waits
        self._lock = threading.Lock()
        self._then: list[Callable[[], None]] = []
        self._leaves: list[Any] = []
        self.error: BaseException | None = None
        self._given_up: BaseException | None = None

    def arrive(self, leaves: list[Any], error: BaseException | None = None) -> None:
        """Sets the results, or the error; only the first time counts, and the first after `take_back`."""
        with self._lock:
            if self.done:
                return
            self._leaves, self.error, self.done, self.was_there = leaves, error, True, True
            self._cancel = None
            self._wake()
            then, self._then = self._then, []
        _call_in_turn(then)

    def _wake(self) -> None:
        """Wakes those who wait, or has them wait again; called with the lock held."""
        if self._woken is not None:
            (self._woken.set if self.done or self._given_up is not None else self._woken.clear)()

    def take_back(self) -> None:
        """Forgets the results, as the closure is computed again; whoever has read them read those of another history."""
        with self._lock:
            if self.done and self.error is None:
                self.done, self._leaves = False, []
                self._wake()

    def give_up(self, error: BaseException | None) -> None:
        """Raises an error instead of waiting from now on; with None, waits again."""
        with self._lock:
            self._given_up = error
            self._wake()

    def then(self, call: Callable[[], None]) -> None:
        """Calls something once the results are there, or at once."""
        with self._lock:
            if not self.done:
                self._then.append(call)
                return
        call()

    def wait(self, timeout_s: float | None) -> list[Any]:
        """Waits for the results and returns them, or raises the closure's error."""
        with self._lock:
            woken = self._woken = self._woken or threading.Event()
            self._wake()
        if not woken.wait(timeout_s):
            raise TimeoutError(
                f"closure {self.number} is not done after {timeout_s:g} s; it goes on. Wait longer, or without `timeout_s`."
            )
        with self._lock:
            is_there, error = self.done, self.error if self.done else self._given_up
        if error is not None:
            raise error
        return self._leaves if is_there else self.wait(timeout_s)  # it is not given up any more


def _call_in_turn(calls: Sequence[Callable[[], None]]) -> None:
    """Makes calls that may lead to further ones, which come after them instead of inside: a chain may be long."""
    queue: deque[Callable[[], None]] | None = getattr(_CALLS, "queue", None)
    if queue is not None:
        queue.extend(calls)
        return
    _CALLS.queue = queue = deque(calls)
    try:
        while queue:
            queue.popleft()()
    finally:
        del _CALLS.queue


def when_all_arrived(pending: Sequence[Pending], call: Callable[[], None]) -> None:
    """Calls something once the results of all of these closures are there, or at once."""
    if not pending:
        call()
        return
    first, *rest = pending
    first.then(lambda: when_all_arrived(rest, call))


class RemoteValue(NDArrayOperatorsMixin):
    """An array that workers compute, or have computed.

    `float(value)`, `numpy.asarray(value)`, `value.item()`, arithmetic and comparisons wait for it, and give what they give of
    the array.

    Source: `tf.distribute.experimental.coordinator.RemoteValue`.
    """

    def __init__(self, pending: Sequence[Pending], read: Read, *, struct: Any = None):
        """Stands for the array that `read` makes of the closures' results; `struct` is its form, if that is known before."""
        self.pending, self._read, self.struct = tuple(pending), read, struct

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            from jdist.support.tensorflow_names import VALUE_NAMES, unknown

            known = [each for each in dir(type(self)) if each[0] != "_"]
            raise unknown("a jdist.ps.RemoteValue", name, known, VALUE_NAMES)

    def result(self, timeout_s: float | None = None) -> np.ndarray:
        """Waits for the array, and returns it.

        Args:
            timeout_s: seconds to wait for each of its closures; None: as long as it takes.

        Raises:
            TimeoutError: it was not there in time.
            ClosureCancelledError: the closure was cancelled: by `cancel`, or as another had failed.
            ClosureError: the closure failed.
            ShardLostError: a parameter server is gone.
        """
        return self._read([p.wait(timeout_s) for p in self.pending])

    def cancel(self) -> bool:
        """Cancels the call that it results from, with its other results, if no worker has had it yet.

        A step that is cancelled takes no effect. `join` does not wait for it, and other calls go on; those that take it as an
        argument are cancelled with it.

        Returns:
            Whether it is cancelled. False: it is too late, as a worker has it, or it is done; or the mode is synchronous.
        """
        cancel = self.pending[0]._cancel if self.pending else None
        return cancel is not None and cancel(self.pending)

    def map(self, function: Callable[[np.ndarray], Any]) -> RemoteValue:
        """Applies `function` to the array, on the host, once it is there."""
        return RemoteValue(self.pending, lambda results: function(self._read(results)))

    @property
    def done(self) -> bool:
        """Returns whether it is there, or will never be."""
        return all(p.done for p in self.pending)

    @property
    def error(self) -> BaseException | None:
        """Why it will never be there; None if it is, or is still to come."""
        return next((p.error for p in self.pending if p.error is not None), None)

    def __float__(self) -> float:
        return float(self.result())

    def __int__(self) -> int:
        return int(self.result())

    def __bool__(self) -> bool:
        return bool(self.result())

    def __hash__(self) -> int:
        return id(self)

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else repr(self)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        arrays = [x.result() if isinstance(x, RemoteValue) else x for x in inputs]
        return getattr(ufunc, method)(*arrays, **kwargs)

    def item(self) -> Any:
        """Returns the only number of the array, as Python has it; waits for it."""
        return self.result().item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.result(), dtype)

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "done" if self.done else "pending"
        numbers = ", ".join(str(p.number) for p in self.pending)
        return f"RemoteValue(closure {numbers}, {state})"


def leaf(number: int) -> Read:
    """Reads one of the results of the only closure."""
    return lambda results: results[0][number]


def stacked(values: Sequence[RemoteValue]) -> RemoteValue:
    """Stacks several closures' results of one name along a new first axis."""
    parts: list[tuple[slice, Read]] = []
    pending: list[Pending] = []
    for value in values:
        parts.append((slice(len(pending), len(pending) + len(value.pending)), value._read))
        pending += value.pending
    return RemoteValue(pending, lambda results: np.stack([read(results[part]) for part, read in parts]))
