"""The sockets and the thread of process 0's `Hub`."""

from __future__ import annotations

import contextlib
import hmac
import logging
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from jdist.cluster.watch import hub as hubs
from jdist.cluster.watch.hub import Hub, Message, Tell
from jdist.cluster.watch.lines import BadMessage, Reader, send

_log = logging.getLogger(__name__)
_HELLO_S = 5.0  # a connection that says nothing for so long is closed
_SEND_S = 2.0  # and one that takes in nothing


@dataclass(eq=False)
class _Line:
    """A connection, and what is known of the process at its other end."""

    connection: socket.socket
    peer: str
    since_s: float
    reader: Reader = field(default_factory=Reader)
    process: int | None = None


class Switchboard:
    """Takes in the processes' messages, and passes on what the hub answers.

    Args:
        server: a socket that listens.
        hub: the state at the start.
        token: what a hello must show.
        beat_s: the longest time between two looks at the clock.
    """

    def __init__(self, server: socket.socket, hub: Hub, token: str, beat_s: float):
        self._server, self._hub, self._token, self._beat_s = server, hub, token, beat_s
        self._lines: dict[int, _Line] = {}  # by process
        self._selector = selectors.DefaultSelector()
        self._ended = threading.Event()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="jdist-switchboard", daemon=True)
        self._thread.start()

    @property
    def missing(self) -> list[int]:
        """The processes that have not come yet."""
        return [i for i in range(self._hub.count) if i not in self._hub.members]

    def close(self) -> None:
        """Ends the thread and closes all connections; waits at most 2 s."""
        self._ended.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                for key, _ in self._selector.select(self._beat_s):
                    if key.data is None:
                        self._accept()
                    else:
                        self._read(key.data)
                now_s = time.monotonic()
                self._advance(hubs.ticked(self._hub, now_s))
                for line in [key.data for key in list(self._selector.get_map().values()) if key.data]:
                    if line.process is None and now_s - line.since_s > _HELLO_S:
                        self._hang_up(line)
        finally:
            for key in list(self._selector.get_map().values()):
                with contextlib.suppress(OSError):
                    key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue] # all of them are sockets
            self._selector.close()

    def _accept(self) -> None:
        try:
            connection, address = self._server.accept()
        except OSError:
            return  # whoever it was has gone again
        connection.settimeout(_SEND_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = _Line(connection, f"{address[0]}:{address[1]}", time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ, line)

    def _read(self, line: _Line) -> None:
        try:
            data = line.connection.recv(1 << 16)
            messages = line.reader.feed(data) if data else []
        except (OSError, BadMessage) as exc:
            _log.debug("%s: %s", line.peer, exc)
            data, messages = b"", []
        for message in messages:
            if line.process is not None:
                self._advance(hubs.heard(self._hub, line.process, message, time.monotonic()))
            elif not self._greet(line, message):
                return
        if not data:
            self._hang_up(line)

    def _greet(self, line: _Line, hello: Message) -> bool:
        """Takes a process in, or says why not."""
        if hello["type"] != "hello":
            why = "it did not say hello first"
        elif not hmac.compare_digest(str(hello.get("token")).encode(), self._token.encode()):
            why = "its JDIST_TOKEN is not that of process 0"
        else:
            why = hubs.refusal(self._hub, hello)
        if why is not None:
            with contextlib.suppress(OSError):
                send(line.connection, {"type": "refused", "reason": why})
            self._hang_up(line)
            return False
        line.process = int(hello["process"])
        self._lines[line.process] = line
        address = hello.get("address")
        address = address if isinstance(address, str) else line.peer
        self._advance(hubs.joined(self._hub, line.process, address, time.monotonic()))
        return True

    def _advance(self, following: tuple[Hub, list[Tell]]) -> None:
        self._hub, tells = following
        for to, message in tells:
            for process in list(self._lines) if to is None else [to]:
                line = self._lines.get(process)
                if line is not None:
                    self._say(line, message)

    def _say(self, line: _Line, message: dict[str, Any]) -> None:
        try:
            send(line.connection, message)
        except OSError as exc:
            _log.debug("%s: %s", line.peer, exc)
            self._hang_up(line)

    def _hang_up(self, line: _Line) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(line.connection)
        line.connection.close()
        if line.process is not None and self._lines.get(line.process) is line:
            del self._lines[line.process]
            self._advance(hubs.disconnected(self._hub, line.process))
