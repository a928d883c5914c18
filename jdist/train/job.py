"""A function on a thread of its own, waited for with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jdist.errors import CheckpointError


class Job:
    """A function on a thread of its own, so that a wait for it ends in time and runs in no event loop.

    The thread is a daemon: a disk that never answers must not keep the process from ending.
    """

    def __init__(self, work: Callable[[], Any]):
        self._future: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=(work,), name="jdist-checkpoint", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - not swallowed: raised in the thread that asks for the result
            self._future.set_exception(error)
        else:
            self._future.set_result(result)

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout_s: float, what: str) -> Any:
        try:
            result = self._future.result(timeout_s)
        except TimeoutError as error:
            if self._future.done():
                raise
            raise CheckpointError(f"{what}: not done after {timeout_s:g} s (`timeout_s`); it goes on") from error
        finally:
            if self._future.done():
                self._thread.join()
        return result
