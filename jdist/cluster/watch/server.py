"""`WatchServer`: the sockets and the thread round process 0's `Membership`."""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable

from jdist.cluster.address import join
from jdist.cluster.watch import membership
from jdist.cluster.watch.membership import Membership, Transition
from jdist.cluster.watch.messages import MOST_BYTES, BadMessage, Connection, Message, WakeupPipe
from jdist.support.versions import difference, versions

_log = logging.getLogger(__name__)
_HELLO_S = 5.0  # after which a connection without a hello is closed
_HELLO_BYTES = 4096  # longest hello
_MOST_STRANGERS = 64  # connections without a hello; the oldest makes way


class _Peer(Connection):
    """A connection, and what is known of the process at its other end."""

    def __init__(self, connection: socket.socket, address: str, count: int):
        # At most two rounds of everyone's values are kept for it.
        super().__init__(connection, most_bytes=_HELLO_BYTES, most_unsent_bytes=2 * (count + 1) * MOST_BYTES)
        self.address = address
        self.since_s = time.monotonic()
        self.process: int | None = None
        self.end: object = "it sent no hello"


class WatchServer:
    """Receives the messages of `count` processes, and sends the membership's answers."""

    # `server` is a listening socket; each hello must have the `token`. For the times see `Watch`.

    def __init__(
        self,
        server: socket.socket,
        count: int,
        *,
        silence_s: float,
        start_timeout_s: float,
        token: str,
        on_lost: Callable[[int], object] = lambda process: None,  # called from the thread
    ):
        now_s = time.monotonic()
        self._on_lost = on_lost
        self._server, self._token = server, token.encode()
        self._state = Membership(count=count, silence_s=silence_s, start_by_s=now_s + start_timeout_s, awake_s=now_s)
        self._beat_s = silence_s / 5
        self._ticked_s = 0.0
        self._peers: dict[int, _Peer] = {}  # by process
        self._strangers: list[_Peer] = []  # the oldest first
        self._broken: list[_Peer] = []
        self._num_turned_away = 0  # connections without a hello that was accepted
        self._changed = threading.Condition()
        self._ended, self._wakeup = False, WakeupPipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="jdist-watch-server", daemon=True)
        self._thread.start()

    @property
    def is_complete(self) -> bool:
        """Returns whether all processes have come."""
        return not self._state.absent

    def wait_until_alone(self, timeout_s: float) -> None:
        """Waits, at most `timeout_s`, until the connections of all processes but process 0 have ended."""
        with self._changed:
            self._changed.wait_for(lambda: set(self._peers) <= {0}, timeout_s)

    def close(self) -> None:
        """Ends the thread and closes all connections."""
        self._ended = True
        self._wakeup.wake()
        self._thread.join(2.0)

    def _run(self) -> None:
        try:
            while not self._ended:
                ready = self._selector.select(self._beat_s)
                self._advance(membership.wake(self._state, time.monotonic()))
                for key, events in ready:
                    if key.fileobj is self._wakeup:
                        self._wakeup.clear()
                    elif key.fileobj is self._server:
                        self._accept()
                    else:
                        self._serve(key.data, events)
                self._look_at_clock(time.monotonic())
                while self._broken:
                    self._disconnect(self._broken.pop())
        finally:
            for peer in [*self._strangers, *self._peers.values()]:
                peer.close()
            self._server.close()
            self._selector.close()
            self._wakeup.close()

    def _look_at_clock(self, now_s: float) -> None:
        if now_s - self._ticked_s >= self._beat_s:
            self._ticked_s = now_s
            self._advance(membership.tick(self._state, now_s))
        self._broken += [stranger for stranger in self._strangers if now_s - stranger.since_s > _HELLO_S]

    def _accept(self) -> None:
        if len(self._strangers) >= _MOST_STRANGERS:
            self._disconnect(self._strangers[0])
        try:
            connection, address = self._server.accept()
        except OSError as exc:  # the other end has gone again, or too many files are open
            self._note_stranger("an unknown address", exc)
            return
        peer = _Peer(connection, join(address[0], address[1]), self._state.count)
        self._strangers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _serve(self, peer: _Peer, events: int) -> None:
        if peer.connection.fileno() < 0:
            return  # it has made way in this very round
        try:
            if events & selectors.EVENT_WRITE:
                peer.flush()
                self._select(peer)
            if events & selectors.EVENT_READ:
                for message in peer.receive():
                    if peer.process is not None:
                        self._advance(membership.receive(self._state, peer.process, message, time.monotonic()))
                        if message["type"] == "gone":
                            self._broken.append(peer)
                    elif not self._greet(peer, message):
                        return
        except (OSError, BadMessage) as exc:
            peer.end = exc
            self._broken.append(peer)

    def _greet(self, peer: _Peer, hello: Message) -> bool:
        """Takes in a process, or refuses it with the reason; returns whether it took it in."""
        lasts, differ = False, difference(versions(), hello.get("versions"), same_step=True)
        if hello["type"] != "hello":
            why = "it did not say hello first"
        elif not hmac.compare_digest(str(hello.get("token")).encode(errors="replace"), self._token):
            why = "its JDIST_TOKEN is not that of process 0"
        else:
            why, lasts = membership.refusal(self._state, hello), hello.get("count") != self._state.count
        is_unfit = why is None and differ is not None
        if why is None and differ is not None:
            why, lasts = f"{differ.text}. Install the same versions on all hosts", True
        if why is not None:
            peer.end = why
            self._broken.append(peer)
            if hello["type"] == "hello":
                self._state = membership.note_refused(self._state, peer.address, why, lasts=lasts)
            ended = self._state.given_up or self._state.lost is not None
            self._send(peer, {"type": "refused", "reason": why, "ended": ended})
            if is_unfit:  # it is one that the others wait for
                self._advance(membership.give_up(self._state))
            return False
        peer.process = int(hello["process"])
        peer.most_bytes = MOST_BYTES
        self._strangers.remove(peer)
        self._peers[peer.process] = peer
        address = hello.get("address")
        address = address if isinstance(address, str) else peer.address
        self._advance(membership.join(self._state, peer.process, address, time.monotonic()))
        return True

    def _advance(self, transition: Transition) -> None:
        before, (self._state, outgoing) = self._state, transition
        if self._state.lost is not None and before.lost is None:
            self._on_lost(self._state.lost)
        for to, message in outgoing:
            # Process 0 hears last: it goes on at once, and may stop before the others have heard.
            for process in sorted(self._peers, reverse=True) if to is None else [to]:
                if (peer := self._peers.get(process)) is not None:
                    self._send(peer, message)

    def _send(self, peer: _Peer, message: Message) -> None:
        try:
            peer.send(message)
            self._select(peer)
        except OSError as exc:
            peer.end = exc
            self._broken.append(peer)

    def _select(self, peer: _Peer) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.has_unsent else 0)
        if self._selector.get_key(peer.connection).events != events:
            self._selector.modify(peer.connection, events, peer)

    def _note_stranger(self, address: str, why: object) -> None:
        """Logs the first stranger, and further ones at powers of ten: a scanner may come thousands of times."""
        self._num_turned_away += 1
        if str(self._num_turned_away).strip("0") == "1":
            text = "the watch turned away a connection from %s (%s); %d since the start"
            _log.warning(text, address, why, self._num_turned_away)

    def _disconnect(self, peer: _Peer) -> None:
        if peer.connection.fileno() < 0:
            return
        self._selector.unregister(peer.connection)
        peer.close()
        if peer in self._strangers:
            self._strangers.remove(peer)
            self._note_stranger(peer.address, peer.end)
        process = peer.process
        if process is not None:
            with self._changed:
                del self._peers[process]
                self._changed.notify_all()
            self._advance(membership.disconnect(self._state, process))
