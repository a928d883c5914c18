"""Messages over a socket: one JSON object a line, bounded in length."""

from __future__ import annotations

import json
import socket
from typing import Any

MOST_BYTES = 1 << 20  # of a line; what the processes tell each other is small


class BadMessage(ValueError):
    """What came is no message."""


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends a message, whole.

    Raises:
        OSError: the connection is broken, or nobody reads at its other end.
    """
    connection.sendall(json.dumps(message).encode() + b"\n")


class Reader:
    """Cuts what comes over a connection into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that are whole now.

        Raises:
            BadMessage: a line is too long, or no JSON object with a "type".
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_BYTES or any(len(line) > MOST_BYTES for line in lines):
            raise BadMessage(f"a line is longer than {MOST_BYTES} bytes")
        return [_message(line) for line in lines]


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise BadMessage("a line is no JSON") from exc
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise BadMessage('a line is no object with a "type"')
    return message
