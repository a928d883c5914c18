"""The moment at which the devices run out of steps, which nobody else is told."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

import jax

_CLOSE_TIMEOUT_S = 1.0


class DeviceWatch:
    """A thread that waits for the newest step, and notes its end."""

    # JAX returns from a call before the devices have made the step, and does not report its end.
    # The thread is woken only after they ran dry: while steps wait for the devices it sleeps
    # through them, so it costs only spare time. It is not woken for a step that was over when its
    # call returned. If other threads hold the interpreter, its notes may be some milliseconds late.

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._newest: jax.Array | None = None
        # The newest that is known to be over, and since when: as the thread has seen it, and the caller.
        self._over: tuple[jax.Array | None, float] = (None, 0.0)
        self._over_at_once: tuple[jax.Array | None, float] = (None, 0.0)
        self._sleeps = self._stops = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="jdist-device-watch")
        self._thread.start()

    def add(self, token: jax.Array | None) -> None:
        """Takes in an array that is ready once the newest step is over, and is never donated; None: there is none."""
        self._newest = token
        if token is None:
            return
        array: Any = token  # the stubs of `jax.Array` lack `is_ready`
        if array.is_ready():
            self._over_at_once = token, self._clock()
        elif self._sleeps:
            self._wake.put(None)

    def idle_since(self) -> float | None:
        """Returns since when the devices have had nothing to do, as far as is known; None while they have."""
        newest = self._newest
        for over, since in (self._over_at_once, self._over):
            if over is newest:
                return since
        return None

    def close(self) -> None:
        """Ends the thread, which may not be in XLA when the interpreter goes; a step that hangs is not waited for."""
        self._stops = True
        self._wake.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stops:
            token = self._newest
            if token is None or self.idle_since() is not None:
                self._sleeps = True
                if self._newest is token and not self._stops:  # else the wake-up has been missed
                    self._wake.get()
                self._sleeps = False
                continue
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the loop raises it, where it waits for the step
                token.block_until_ready()
            self._over = token, self._clock()
            del token
