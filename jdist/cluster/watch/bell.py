"""Wakes a thread that waits in `select`."""

from __future__ import annotations

import contextlib
import socket


class Bell:
    """Can be waited for by a selector until it is rung; ringing never waits, so a signal handler may."""

    def __init__(self) -> None:
        self._rope, self._ear = socket.socketpair()
        self._rope.setblocking(False)
        self._ear.setblocking(False)

    def fileno(self) -> int:
        """For the selector."""
        return self._ear.fileno()

    def ring(self) -> None:
        """Wakes who waits."""
        with contextlib.suppress(OSError):  # full, so it rings already; or closed, so nobody waits any more
            self._rope.send(b"!")

    def hear(self) -> None:
        """Silences it."""
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(4096)

    def close(self) -> None:
        """Closes it; by the thread that waits."""
        self._rope.close()
        self._ear.close()
