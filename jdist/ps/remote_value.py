"""What a scheduled closure will have returned."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from jdist.errors import ClosureCancelledError


class Pending:
    """The results of one closure, which arrive once.

    Attributes:
        number: the closure's.
    """

    def __init__(self, number: int):
        self.number = number
        self._arrived = threading.Event()
        self._leaves: list[Any] = []
        self._error: BaseException | None = None

    def arrive(self, leaves: list[Any], error: BaseException | None = None) -> None:
        """Sets the results, or the error; only the first time counts."""
        if not self._arrived.is_set():
            self._leaves, self._error = leaves, error
            self._arrived.set()

    def wait(self, timeout_s: float | None) -> list[Any]:
        """The results.

        Raises:
            TimeoutError: they have not arrived within `timeout_s`.
        """
        if not self._arrived.wait(timeout_s):
            raise TimeoutError(f"closure {self.number} is not done after {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return self._leaves

    @property
    def done(self) -> bool:
        """Whether they have arrived, or the closure has failed."""
        return self._arrived.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None if it did not, or not yet."""
        return self._error


class RemoteValue:
    """An array that a worker computes, or has computed. `float(value)` and `numpy.asarray(value)` wait for it.

    Source: `tf.distribute.experimental.coordinator.RemoteValue`.
    """

    def __init__(self, pending: Pending, leaf: int):
        self._pending, self._leaf = pending, leaf

    def result(self, timeout_s: float | None = None) -> np.ndarray:
        """The array.

        Args:
            timeout_s: seconds to wait; None: as long as it takes.

        Raises:
            TimeoutError: it was not there in time.
            ClosureCancelledError: the closure was cancelled, as another had failed.
            ClosureError: the closure failed.
        """
        return self._pending.wait(timeout_s)[self._leaf]

    @property
    def done(self) -> bool:
        """Whether it is there, or will never be."""
        return self._pending.done

    @property
    def error(self) -> BaseException | None:
        """Why it will never be there; None if it is, or is still to come."""
        return self._pending.error

    @property
    def is_cancelled(self) -> bool:
        """Whether the closure was cancelled before a worker had it."""
        return isinstance(self._pending.error, ClosureCancelledError)

    def __float__(self) -> float:
        return float(self.result())

    def __int__(self) -> int:
        return int(self.result())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.result(), dtype)

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "done" if self.done else "pending"
        return f"RemoteValue(closure {self._pending.number}, {state})"
