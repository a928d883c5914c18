"""Work on a thread of its own, for which every wait has a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jdist.errors import CheckpointError


class Job:
    """A function on its own thread: a wait for it is bounded and runs in no event loop."""

    # The thread is a daemon: a disk that never answers must not keep the process from ending.

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
        finally:
            del self  # an error holds its frames, and these would hold it

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout_s: float, what: str, since_s: float | None = None) -> Any:
        """Returns the function's result, or raises its error, at most `timeout_s` after `since_s` (None: now)."""
        left_s = timeout_s if since_s is None else max(0.0, since_s + timeout_s - time.monotonic())
        try:
            result = self._future.result(left_s)
        except TimeoutError as error:
            if self._future.done():
                raise
            raise CheckpointError(f"{what}: not done after {timeout_s:g} s (`timeout_s`); it goes on") from error
        finally:
            if self._future.done():
                self._thread.join()
            del self  # as in `_run`
        return result
