"""Data connections next to gRPC: TLS if there are certificates, else TCP, or Unix sockets within one machine.

gRPC copies each byte several times; these connections send and receive arrays without a copy. gRPC decides who may connect: a
caller that has shown its token there gets a *ticket*, which opens one connection, once, within seconds. A call, like an answer,
is a header and the bytes of its arrays.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jdist.errors import WireError
from jdist.ps.protocol.wire import Spec
from jdist.ps.transport.interface import EXHAUSTED, Answer, Arrays, CallFailed, Expects, Header
from jdist.ps.transport.security import Security
from jdist.ps.transport.stream import Stream

_LOG = logging.getLogger(__name__)
TICKET_S = 10.0  # from a ticket to the connection that it opens
MOST_CONNECTIONS = 256
MOST_STRANGERS = 32  # connections without a ticket yet; beyond, the oldest has to go
# Calls with many bytes under way at once: a server's memory does not grow with the number of its workers.
MOST_LARGE = 2
ROOM_S = 120.0
_POLL_S = 1.0  # between looks for strangers past their time
_PAUSE_S = 0.1  # after a connection that could not be accepted
UNREACHABLE_S = 60.0  # for so long gRPC is used instead of data connections that cannot be had
_TICKET_BYTES = 32
_NAME = "\0jdist-"
_STOP_S = 3.0


class BulkServer:
    """Answers calls over data connections."""

    def __init__(self, host: str, answer: Callable[..., tuple[Header, Arrays]], *, security: Security):
        """Listens at a free port; `answer(stream, make_room) -> (header, arrays)` receives and runs one call."""
        # A call with many bytes calls `make_room` before it receives them; at most `MOST_LARGE` of
        # these run at the same time.
        host = host.strip("[]")
        self._answer, self._tls = answer, security.tls(server=True)
        self._listener = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=64
        )
        self.port = self._listener.getsockname()[1]
        # In Linux's abstract namespace: no file, and out of reach from other network namespaces.
        self.name = f"{_NAME}{secrets.token_hex(16)}" if sys.platform == "linux" and self._tls is None else ""
        self._listeners = [self._listener]
        if self.name:
            self._listeners.append(socket.socket(socket.AF_UNIX))
            self._listeners[1].bind(self.name)
            self._listeners[1].listen(64)
        self._lock = threading.Lock()
        self._tickets: dict[bytes, float] = {}  # and when each ends
        self._streams: dict[Stream, threading.Thread] = {}  # and who serves each
        # Connections that have not shown a ticket, and until when they may.
        self._strangers: dict[threading.Thread, tuple[socket.socket, float]] = {}
        self.full = set[socket.socket]()  # those that accept nothing, as this process has as many files open as it may
        self._room = threading.Semaphore(MOST_LARGE)
        self._closed = False
        for listener in self._listeners:
            listener.settimeout(_POLL_S)
            threading.Thread(target=self._accept, args=(listener,), name="jdist-bulk", daemon=True).start()

    def ticket(self) -> bytes:
        """Returns a ticket for one connection, to be handed to a caller with the right token."""
        ticket, now = secrets.token_bytes(_TICKET_BYTES), time.monotonic()
        with self._lock:
            self._tickets = {t: end for t, end in self._tickets.items() if end > now}
            self._tickets[ticket] = now + TICKET_S
        return ticket

    def stop(self) -> bool:
        """Ends all connections; returns whether their threads ended within a few seconds."""
        # A thread that returns from C++ while the interpreter ends aborts the process.
        with self._lock:
            self._closed = True
            streams = dict(self._streams)
            self._send_away(set(self._strangers))
        for listener in self._listeners:
            listener.close()
        for stream in streams:
            stream.close()
        end = time.monotonic() + _STOP_S
        for thread in streams.values():
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in streams.values())

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                self.full.discard(listener)  # nobody waits
            except OSError as exc:
                if self._closed:
                    return
                # No files left, no memory, a caller that has gone: others may be accepted later.
                if listener not in self.full:
                    _LOG.error("no data connection can be accepted for now, and is tried again: %s", exc)
                self.full.add(listener)
                time.sleep(_PAUSE_S)
            else:
                self.full.discard(listener)
                self._begin(connection)
            self._send_away_dawdlers()

    def _begin(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(connection,), name="jdist-bulk", daemon=True)
        with self._lock:
            self._strangers[thread] = connection, time.monotonic() + TICKET_S
        try:
            thread.start()
        except RuntimeError as exc:
            _LOG.error("no thread for a data connection: %s", exc)
            with self._lock:
                del self._strangers[thread]
            connection.close()

    def _send_away_dawdlers(self) -> None:
        """Ends connections that have not shown a ticket in time, and the oldest of too many."""
        now = time.monotonic()
        with self._lock:
            late = {thread for thread, (_, by) in self._strangers.items() if by < now}
            self._send_away(late | set(list(self._strangers)[:-MOST_STRANGERS]))

    def _send_away(self, threads: set[threading.Thread]) -> None:
        for thread in threads:
            connection, _ = self._strangers.pop(thread)
            with contextlib.suppress(OSError):  # it has gone by itself
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits, which closes it

    def _serve(self, connection: socket.socket) -> None:
        stream: Stream | None = None
        try:
            connection.settimeout(TICKET_S)
            _tune(connection)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                with self._lock:
                    if threading.current_thread() not in self._strangers:
                        return  # sent away
                    self._strangers[threading.current_thread()] = connection, time.monotonic() + TICKET_S
                connection.do_handshake()
            shown = bytearray(_TICKET_BYTES)
            stream = Stream(connection)
            stream.read_into(memoryview(shown), time.monotonic() + TICKET_S)
            if not self._admit(stream, bytes(shown)):
                return
            while stream.wait_for_more():
                with contextlib.ExitStack() as held:
                    answer, arrays = self._answer(stream, lambda held=held: self._make_room(held))
                    stream.send(answer, arrays)
                    del answer, arrays  # nothing is held while it waits
        except (OSError, EOFError, WireError) as exc:
            if not self._closed:
                _LOG.info("a data connection ended: %s", exc or type(exc).__name__)
        finally:
            with self._lock:
                self._strangers.pop(threading.current_thread(), None)
                if stream is not None:
                    self._streams.pop(stream, None)
            connection.close()

    def _make_room(self, held: contextlib.ExitStack) -> None:
        """Waits until fewer large calls are under way; the caller's is one from now on, until its answer is sent."""
        if not self._room.acquire(timeout=ROOM_S):
            raise TimeoutError("others' large calls take too long")
        held.callback(self._room.release)

    def _admit(self, stream: Stream, shown: bytes) -> bool:
        now = time.monotonic()
        with self._lock:
            equal = [ticket for ticket in self._tickets if hmac.compare_digest(ticket, shown)]
            is_valid = bool(equal) and self._tickets.pop(equal[0]) > now
            is_valid = self._strangers.pop(threading.current_thread(), None) is not None and is_valid
            if not is_valid or self._closed or len(self._streams) >= MOST_CONNECTIONS:
                _LOG.warning("refused a data connection")
                return False
            self._streams[stream] = threading.current_thread()
        return True


class BulkChannel:
    """Data connections to one server, as many as there are calls at the same time."""

    # `ask` gets a port, a Unix socket's name and a ticket over gRPC within so many seconds.

    def __init__(self, address: str, *, security: Security, ask: Callable[[float], tuple[int, str, bytes]]):
        self._address, self._host = address, address.rpartition(":")[0].strip("[]")
        self._ask, self._name, self._tls = ask, security.name, security.tls(server=False)
        self._lock = threading.Lock()
        self._idle: list[Stream] = []
        self._busy: set[Stream] = set()
        self._closed = False
        self._unreachable_until = 0.0

    def begin(self, header: Header, arrays: Arrays, expects: Expects, timeout_s: float) -> Callable[[], Answer] | None:
        """Sends a call; returns a function that waits for the answer, None without a connection."""
        by = time.monotonic() + timeout_s
        stream = self._stream(by)
        if stream is None:
            return None
        self._failing(stream, lambda: stream.send(header, arrays, by=by))

        def expected(header: Header) -> Sequence[Spec]:
            return () if "failed" in header else expects(header)

        def finish() -> Answer:
            answer, received = self._failing(stream, lambda: stream.receive(expected, most_bytes=1 << 40, by=by))
            if "failed" in answer:
                self._drop(stream)
                word = str(answer["failed"])[:40]
                raise CallFailed(self._address, EXHAUSTED if word == EXHAUSTED else "refused", word)
            with self._lock:
                self._busy.discard(stream)
                if not self._closed:
                    self._idle.append(stream)
            return answer, received

        return finish

    def _failing(self, stream: Stream, run: Callable[[], Any]) -> Any:
        """Calls `run`; whatever goes wrong in the middle of a message is the end of its connection."""
        try:
            return run()
        except TimeoutError as exc:
            self._drop(stream)
            raise CallFailed(self._address, "deadline") from exc
        except (OSError, EOFError) as exc:
            self._drop(stream)
            raise CallFailed(self._address, "unavailable", str(exc)) from exc
        except BaseException:
            self._drop(stream)
            raise

    def close(self) -> None:
        """Ends all connections; calls under way fail."""
        with self._lock:
            self._closed = True
            streams, self._idle = [*self._idle, *self._busy], []
        for stream in streams:
            stream.close()

    def _drop(self, stream: Stream) -> None:
        with self._lock:
            self._busy.discard(stream)
        stream.close()

    def _stream(self, by: float) -> Stream | None:
        with self._lock:
            if self._closed:
                raise CallFailed(self._address, "closed")
            if self._idle:
                self._busy.add(self._idle[-1])
                return self._idle.pop()
        if time.monotonic() < self._unreachable_until:
            return None
        where = ""
        try:
            port, name, ticket = self._ask(by - time.monotonic())
            where = f" to port {port}"
            timeout_s = min(5.0, by - time.monotonic())
            connection = self._open_here(name, ticket, timeout_s) or self._open(port, ticket, timeout_s)
        except OSError as exc:
            if isinstance(exc, CallFailed) and exc.reason != "refused":
                raise
            _LOG.warning("%s: no data connection%s, gRPC is slower: %s", self._address, where, exc)
            self._unreachable_until = time.monotonic() + UNREACHABLE_S
            return None
        stream = Stream(connection)
        with self._lock:
            if self._closed:
                stream.close()
                raise CallFailed(self._address, "closed")
            self._busy.add(stream)
        return stream

    def _open_here(self, name: str, ticket: bytes, timeout_s: float) -> socket.socket | None:
        """Connects to a server of this machine; None without one in this network namespace, or under TLS."""
        if self._tls is not None or not name.startswith(_NAME):
            return None
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        try:
            connection.connect(name)
            connection.sendall(ticket)
        except OSError as exc:
            _LOG.debug("%s: no Unix socket: %s", self._address, exc)
            connection.close()
            return None
        return connection

    def _open(self, port: int, ticket: bytes, timeout_s: float) -> socket.socket:
        connection = socket.create_connection((self._host, port), timeout=timeout_s)
        try:
            _tune(connection)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_hostname=self._name or self._host)
            connection.sendall(ticket)
        except BaseException:
            connection.close()
            raise
        return connection


def _tune(connection: socket.socket) -> None:
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
