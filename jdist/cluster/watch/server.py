"""The sockets and the thread of process 0's `Hub`."""

from __future__ import annotations

import contextlib
import hmac
import logging
import selectors
import socket
import threading
import time
from typing import Any

from jdist.cluster.address import join
from jdist.cluster.watch import membership as hubs
from jdist.cluster.watch.membership import Hub, Message, Tell
from jdist.cluster.watch.messages import MOST_BYTES, BadMessage, Line

_log = logging.getLogger(__name__)
_HELLO_S = 5.0  # a connection that does not say who it is for so long is closed
_HELLO_BYTES = 4096  # and one that says more before
_MOST_STRANGERS = 64  # connections that have not said who they are; the oldest makes way


class _Caller(Line):
    """A connection, and what is known of the process at its other end."""

    def __init__(self, connection: socket.socket, peer: str, count: int):
        # Kept for it are at most two rounds of everyone's values.
        super().__init__(connection, most_bytes=_HELLO_BYTES, most_kept_bytes=2 * (count + 1) * MOST_BYTES)
        self.peer = peer
        self.since_s = time.monotonic()
        self.process: int | None = None


class WatchServer:
    """Takes in the processes' messages, and passes on what the hub answers.

    Args:
        server: a socket that listens.
        count: how many processes there are.
        silence_s: a process that was not heard of for so long is lost.
        start_timeout_s: how long to wait until all have come.
        token: what a hello must show.
    """

    def __init__(self, server: socket.socket, count: int, *, silence_s: float, start_timeout_s: float, token: str):
        now_s = time.monotonic()
        self._server, self._token = server, token.encode()
        self._hub = Hub(count=count, silence_s=silence_s, start_by_s=now_s + start_timeout_s, awake_s=now_s)
        self._beat_s = silence_s / 5
        self._told_s = 0.0
        self._callers: dict[int, _Caller] = {}  # by process
        self._strangers: list[_Caller] = []  # the oldest first
        self._broken: list[_Caller] = []
        self._changed = threading.Condition()
        self._ended, self._bell = False, WakeupPipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="jdist-switchboard", daemon=True)
        self._thread.start()

    def wait_until_alone(self, timeout_s: float) -> None:
        """Waits until the lines of all processes but process 0 have ended; at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: set(self._callers) <= {0}, timeout_s)

    def close(self) -> None:
        """Ends the thread and closes all connections."""
        self._ended = True
        self._bell.ring()
        self._thread.join(2.0)

    def _run(self) -> None:
        try:
            while not self._ended:
                ready = self._selector.select(self._beat_s)
                self._advance(hubs.awoke(self._hub, time.monotonic()))
                for key, events in ready:
                    if key.fileobj is self._bell:
                        self._bell.hear()
                    elif key.fileobj is self._server:
                        self._accept()
                    else:
                        self._serve(key.data, events)
                self._look_at_clock(time.monotonic())
                while self._broken:
                    self._hang_up(self._broken.pop())
        finally:
            for caller in [*self._strangers, *self._callers.values()]:
                caller.close()
            self._server.close()
            self._selector.close()
            self._bell.close()

    def _look_at_clock(self, now_s: float) -> None:
        if now_s - self._told_s >= self._beat_s:
            self._told_s = now_s
            self._advance(hubs.ticked(self._hub, now_s))
        self._broken += [stranger for stranger in self._strangers if now_s - stranger.since_s > _HELLO_S]

    def _accept(self) -> None:
        if len(self._strangers) >= _MOST_STRANGERS:
            self._hang_up(self._strangers[0])
        try:
            connection, address = self._server.accept()
        except OSError as exc:  # whoever it was has gone again, or too many files are open
            _log.debug("a connection was not taken: %s", exc)
            return
        caller = _Caller(connection, join(address[0], address[1]), self._hub.count)
        self._strangers.append(caller)
        self._selector.register(connection, selectors.EVENT_READ, caller)

    def _serve(self, caller: _Caller, events: int) -> None:
        if caller.connection.fileno() < 0:
            return  # it has made way in this very round
        try:
            if events & selectors.EVENT_WRITE:
                caller.flush()
                self._await(caller)
            if events & selectors.EVENT_READ:
                for message in caller.take():
                    if caller.process is not None:
                        self._advance(hubs.heard(self._hub, caller.process, message, time.monotonic()))
                        if message["type"] == "gone":
                            self._broken.append(caller)
                    elif not self._greet(caller, message):
                        return
        except (OSError, BadMessage) as exc:
            _log.debug("%s: %s", caller.peer, exc)
            self._broken.append(caller)

    def _greet(self, caller: _Caller, hello: Message) -> bool:
        """Takes a process in, or says why not."""
        misnumbered = False
        if hello["type"] != "hello":
            why = "it did not say hello first"
        elif not hmac.compare_digest(str(hello.get("token")).encode(errors="replace"), self._token):
            why = "its JDIST_TOKEN is not that of process 0"
        else:
            why, misnumbered = hubs.refusal(self._hub, hello), hello.get("count") != self._hub.count
        if why is not None:
            self._broken.append(caller)
            if hello["type"] == "hello":
                self._hub = hubs.refused(self._hub, caller.peer, why, misnumbered=misnumbered)
            self._say(caller, {"type": "refused", "reason": why})
            return False
        caller.process = int(hello["process"])
        caller.reader.most_bytes = MOST_BYTES
        self._strangers.remove(caller)
        self._callers[caller.process] = caller
        address = hello.get("address")
        address = address if isinstance(address, str) else caller.peer
        self._advance(hubs.joined(self._hub, caller.process, address, time.monotonic()))
        return True

    def _advance(self, following: tuple[Hub, list[Tell]]) -> None:
        self._hub, tells = following
        for to, message in tells:
            for process in list(self._callers) if to is None else [to]:
                if (caller := self._callers.get(process)) is not None:
                    self._say(caller, message)

    def _say(self, caller: _Caller, message: dict[str, Any]) -> None:
        try:
            caller.say(message)
            self._await(caller)
        except OSError as exc:
            _log.debug("%s: %s", caller.peer, exc)
            self._broken.append(caller)

    def _await(self, caller: _Caller) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if caller.keeps else 0)
        if self._selector.get_key(caller.connection).events != events:
            self._selector.modify(caller.connection, events, caller)

    def _hang_up(self, caller: _Caller) -> None:
        if caller.connection.fileno() < 0:
            return
        self._selector.unregister(caller.connection)
        caller.close()
        if caller in self._strangers:
            self._strangers.remove(caller)
        process = caller.process
        if process is not None:
            with self._changed:
                del self._callers[process]
                self._changed.notify_all()
            self._advance(hubs.disconnected(self._hub, process))


class WakeupPipe:
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
