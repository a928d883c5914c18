"""Messages over a socket: one JSON object a line, bounded in length. Nothing here ever blocks."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

MOST_BYTES = 1 << 20  # of a message; the values that processes exchange are small
_CHUNK = 1 << 16


class BadMessage(ValueError):
    """The bytes from the other end are no message."""


def encode(message: dict[str, Any]) -> bytes:
    """Encodes a message as a line."""
    return json.dumps(message).encode() + b"\n"


class Reader:
    """Cuts received bytes into messages, of lines of at most `most_bytes`."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Takes in bytes; returns the messages that are whole now.

        Raises:
            BadMessage: a line is too long, or no JSON object with a "type".
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if any(len(line) > self.most_bytes for line in (*lines, self._rest)):
            raise BadMessage(f"a line is longer than {self.most_bytes} bytes")
        return [_message(line) for line in lines]


class Connection:
    """A socket that never blocks: unsent bytes are kept until the other end takes them in.

    It receives messages of at most `most_bytes`, and gives up an end that leaves more than `most_unsent_bytes` unread.
    """

    def __init__(self, connection: socket.socket, *, most_bytes: int, most_unsent_bytes: int):
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # it has broken already, as reading will show
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.reader = Reader(most_bytes)
        self._most_unsent_bytes = most_unsent_bytes
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        """Whether bytes are kept for the other end."""
        return bool(self._unsent)

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, or what can be sent of it now.

        Raises:
            ConnectionError: the other end has long taken nothing in.
        """
        self._unsent += encode(message)
        self.flush()
        if len(self._unsent) > self._most_unsent_bytes:
            raise ConnectionError("it does not take in what it is sent")

    def flush(self) -> None:
        """Sends what can be sent now; a broken connection shows in `receive`, as last words may still be there to read."""
        try:
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()

    def receive(self) -> list[dict[str, Any]]:
        """Receives the messages that have come whole by now.

        Raises:
            OSError: the connection is broken, or was closed at its other end.
            BadMessage: the bytes are no message.
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


class WakeupPipe:
    """Wakes a thread that waits in a selector; `wake` never blocks, so a signal handler may call it."""

    def __init__(self) -> None:
        self._writer, self._reader = socket.socketpair()
        self._writer.setblocking(False)
        self._reader.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes already; closed: nobody waits any more
            self._writer.send(b"!")

    def clear(self) -> None:
        """Takes back all calls of `wake` so far."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)

    def close(self) -> None:
        """Closes it; for the thread that waits."""
        self._writer.close()
        self._reader.close()
