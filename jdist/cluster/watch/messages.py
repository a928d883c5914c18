"""Messages over a socket: one JSON object a line, bounded in length. Nothing here ever blocks.

`membership` has their types. Whoever changes the form of a message raises `PROTOCOL` in support/versions.py.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

Message = dict[str, Any]  # with a "type" of `membership`; a new format raises `PROTOCOL` in support/versions.py
MOST_BYTES = 1 << 20  # most bytes of one process's message; the values that processes exchange are small
_CHUNK = 1 << 16


class BadMessage(ValueError):
    """The bytes from the other end are not a message."""


def encode(message: Message) -> bytes:
    """Encodes a message as a line."""
    return json.dumps(message).encode() + b"\n"


def decode(data: bytes, most_bytes: int) -> tuple[list[Message], bytes]:
    """Decodes the complete messages; returns them and the bytes after them, or raises BadMessage."""
    *lines, rest = data.split(b"\n")
    if any(len(line) > most_bytes for line in (*lines, rest)):
        raise BadMessage(f"a line is longer than {most_bytes} bytes")
    messages = []
    for line in lines:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise BadMessage("a line is not JSON") from exc
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            raise BadMessage('a line is not an object with a "type"')
        messages.append(message)
    return messages, rest


class Connection:
    """A socket that never blocks: unsent bytes are kept until the other end takes them."""

    # It receives messages of at most `most_bytes`, and gives up an end that leaves more than
    # `most_unsent_bytes` unread.

    def __init__(self, connection: socket.socket, *, most_bytes: int, most_unsent_bytes: int):
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # it has broken already, as reading will show
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.most_bytes = most_bytes
        self._most_unsent_bytes = most_unsent_bytes
        self._received = b""  # the beginning of the next message
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        """Returns whether bytes are kept for the other end."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Sends as much of a message as it can now; raises ConnectionError if too much stays unread."""
        self._unsent += encode(message)
        self.flush()
        if len(self._unsent) > self._most_unsent_bytes:
            raise ConnectionError("it does not read its messages")

    def flush(self) -> None:
        """Sends what it can now, and drops the unsent bytes of a broken connection."""
        try:
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:  # `receive` reports it once all that had arrived is read
            self._unsent.clear()

    def receive(self) -> list[Message]:
        """Receives the messages that are complete by now; raises BadMessage, or ConnectionError at the end."""
        try:
            data = self.connection.recv(_CHUNK)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionError("it was closed at its other end")
        messages, self._received = decode(self._received + data, self.most_bytes)
        return messages

    def close(self) -> None:
        """Closes the connection; closing twice changes nothing."""
        self.connection.close()


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
        """Forgets all calls of `wake` so far."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)

    def close(self) -> None:
        """Closes the pipe; called by the thread that waits."""
        self._writer.close()
        self._reader.close()
