"""`Exchanges`: small values that all processes send each other, as one of them sees it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from jdist.cluster.watch.messages import MOST_BYTES, Message, encode
from jdist.cluster.watch.stacks import exchanging
from jdist.errors import ClusterError, ClusterTimeoutError, PeerLostError

_SAME = "All processes must make the same calls in the same order."


class Exchanges:
    """A process's exchanges: each sends a value under a key, and receives all values."""

    # Any thread may call it. `send` sends a message to process 0.

    def __init__(self, send: Callable[[Message], None]):
        self._send = send
        self._changed = threading.Condition()
        self._answers: dict[str, Message | None] = {}  # by key; None: not there yet
        self._forgotten: deque[str] = deque()  # prefixes, not sent yet
        self._lost: PeerLostError | None = None

    def exchange(self, key: str, value: Any, timeout_s: float) -> list[Any]:
        """Sends a JSON value (at most 1 MiB) under a new key; returns all values, by index."""
        self.say(key, value)
        with exchanging():
            values = self.hear(key, timeout_s)
        if values is None:
            with self._changed:
                del self._answers[key]
            raise ClusterTimeoutError(f"the other processes did not reach {key!r} within {timeout_s:g} s. {_SAME}")
        return values

    def say(self, key: str, value: Any) -> None:
        """Sends this process's value of an exchange."""
        message = {"type": "value", "key": key, "value": value}
        if (size := len(encode(message))) > MOST_BYTES:
            raise ClusterError(
                f"what this process says about {key!r} takes {size:,} bytes; at most {MOST_BYTES:,} may be exchanged. Put "
                "more into a file, and exchange its name."
            )
        with self._changed:
            self._answers[key] = None
        self._send(message)

    def hear(self, key: str, timeout_s: float) -> list[Any] | None:
        """Waits for all values under `key`, by index; None if they are late: ask again."""
        with self._changed:
            self._changed.wait_for(lambda: self._answers[key] or self._lost, timeout_s)
            answer = self._answers[key]
            if answer is not None:
                del self._answers[key]
        if answer is None:
            if self._lost is not None:
                raise self._lost
            return None
        if answer["type"] == "values":
            return answer["values"]
        raise ClusterError(
            f"process {answer['process']} will not reach {key!r}: it left that loop, or its program has ended. {_SAME}"
        )

    def forget(self, prefix: str) -> None:
        """Leaves all exchanges with keys that begin with `prefix`; none may be used after that."""
        # It takes no lock and sends nothing, so the garbage collector may call it.
        self._forgotten.append(prefix)

    def send_forgotten(self) -> None:
        """Sends process 0 the prefixes that were forgotten since the last call."""
        while self._forgotten:
            prefix = self._forgotten.popleft()
            with self._changed:
                for key in [key for key in self._answers if key.startswith(prefix)]:
                    del self._answers[key]
            self._send({"type": "forget", "prefix": prefix})

    def take(self, message: Message) -> None:
        """Takes in an answer of process 0; drops one that was forgotten."""
        with self._changed:
            if message["key"] in self._answers:
                self._answers[message["key"]] = message
                self._changed.notify_all()

    def end(self, lost: PeerLostError) -> None:
        """Raises the loss of a process in all that wait."""
        with self._changed:
            self._lost = lost
            self._changed.notify_all()
