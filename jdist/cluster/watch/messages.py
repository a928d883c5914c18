"""Messages over a socket: one JSON object a line, bounded in length. Nothing here ever waits."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

MOST_BYTES = 1 << 20  # of a message; what the processes tell each other is small
_CHUNK = 1 << 16


class BadMessage(ValueError):
    """What came is no message."""


def encode(message: dict[str, Any]) -> bytes:
    """A message as it is sent."""
    return json.dumps(message).encode() + b"\n"


class Reader:
    """Cuts what comes over a connection into messages.

    Args:
        most_bytes: the longest line that is taken.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that are whole now.

        Raises:
            BadMessage: a line is too long, or no JSON object with a "type".
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if any(len(line) > self.most_bytes for line in (*lines, self._rest)):
            raise BadMessage(f"a line is longer than {self.most_bytes} bytes")
        return [_message(line) for line in lines]


class Line:
    """A connection that never waits: what is said is kept until the other end takes it in.

    Args:
        connection: the socket.
        most_bytes: the longest message that is taken from it.
        most_kept_bytes: how much is kept for the other end; it has to read, or is given up.
    """

    def __init__(self, connection: socket.socket, *, most_bytes: int, most_kept_bytes: int):
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # it has broken already, which reading will tell
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.reader = Reader(most_bytes)
        self._most_kept_bytes = most_kept_bytes
        self._kept = bytearray()

    @property
    def keeps(self) -> bool:
        """Whether something is kept for the other end."""
        return bool(self._kept)

    def say(self, message: dict[str, Any]) -> None:
        """Sends a message, or what can be sent of it now.

        Raises:
            ConnectionError: the other end has long taken nothing in.
        """
        self._kept += encode(message)
        self.flush()
        if len(self._kept) > self._most_kept_bytes:
            raise ConnectionError("it does not take in what it is told")

    def flush(self) -> None:
        """Sends what can be sent now of what is kept; that the connection is broken, `take` tells.

        For the other end's last words may still be there to be read.
        """
        try:
            while self._kept:
                del self._kept[: self.connection.send(self._kept)]
        except BlockingIOError:
            return
        except OSError:
            self._kept.clear()

    def take(self) -> list[dict[str, Any]]:
        """The messages that have come whole by now.

        Raises:
            OSError: the connection is broken, or was closed at its other end.
            BadMessage: what has come is no message.
        """
        try:
            data = self.connection.recv(_CHUNK)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionError("it was closed at its other end")
        return self.reader.feed(data)

    def close(self) -> None:
        """Closes the connection; closing twice changes nothing."""
        self.connection.close()


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise BadMessage("a line is no JSON") from exc
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise BadMessage('a line is no object with a "type"')
    return message
