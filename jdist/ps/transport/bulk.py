"""A data connection beside gRPC, for calls with many bytes: TCP, under TLS where there are certificates.

gRPC copies each byte several times; here arrays are sent from where they are and received where they stay. Who may connect is
decided over gRPC: a caller that has shown its token there gets a *ticket*, which opens one connection, once, within seconds. A
call is a header and the bytes of its arrays; so is an answer.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jdist.errors import WireError
from jdist.ps.security import Security
from jdist.ps.transport.seam import Arrays, CallFailed, Header
from jdist.ps.wire import PREFIX_BYTES, Buffers, Spec, as_bytes, body_size, decode, encode

_LOG = logging.getLogger(__name__)
TICKET_S = 10.0  # from a ticket to the connection that it opens
STALL_S = 60.0  # without a byte in the middle of a message
MOST_CONNECTIONS = 256
_LEEWAY_S = 0.5  # so much later a wait may end than it should: to set it anew each time is a call of the system
_SIZE = struct.Struct(">Q")
_SMALL_BYTES = 1 << 16
_TICKET_BYTES = 32

Answer = Callable[[Header, Callable[[Sequence[Spec]], list[np.ndarray]]], tuple[Header, Arrays]]


class Stream:
    """Messages over a socket."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._read_ahead = memoryview(bytearray(_SMALL_BYTES))
        self._there = memoryview(b"")
        self._timeout_s: float | None = -1.0  # as it was set last

    def wait_for_more(self) -> bool:
        """Waits, as long as it takes, until something comes; False if the other side has ended."""
        if self._there:
            return True
        self._timeout_s = None
        self._socket.settimeout(None)
        return self._fill()

    def send(self, header: Header, arrays: Arrays, *, by: float | None = None) -> None:
        """Sends a message.

        Args:
            header: plain values.
            arrays: what goes with it.
            by: when it must be through, by the monotonic clock; None: no wait longer than `STALL_S`.
        """
        payload = [view for view in as_bytes(arrays) if len(view)]
        size = sum(map(len, payload))
        head = _SIZE.pack(size) + encode(header)
        if size <= _SMALL_BYTES:
            head, payload = b"".join([head, *payload]), []
        for view in (memoryview(head), *payload):
            while len(view):
                self._limit(by)
                view = view[self._socket.send(view) :]

    def receive(
        self, expects: Callable[[Header], Sequence[Spec]], *, most_bytes: int, by: float | None = None
    ) -> tuple[Header, list[np.ndarray]]:
        """Receives a message.

        Args:
            expects: the arrays that come with a header.
            most_bytes: of all arrays.
            by: as in `send`.

        Raises:
            WireError: it is not as expected.
            EOFError: the other side has ended.
        """
        first = bytearray(_SIZE.size + PREFIX_BYTES)
        self._into(memoryview(first), by)
        (size,), prefix = _SIZE.unpack_from(first), bytes(first[_SIZE.size :])
        body = bytearray(body_size(prefix))
        self._into(memoryview(body), by)
        try:
            header, _ = decode(prefix + body)
            buffers = Buffers(expects(header), most_bytes=most_bytes)
            if buffers.size_bytes != size:
                raise WireError(f"{size:,} bytes where {buffers.size_bytes:,} are expected")
        except WireError:
            self._skip(min(size, most_bytes), by)  # so that the other side reads why
            raise
        for view in buffers.views:
            self._into(view, by)
        return header, buffers.filled()

    def _skip(self, size: int, by: float | None) -> None:
        nowhere = memoryview(bytearray(min(size, _SMALL_BYTES)))
        while size:
            n = min(size, len(nowhere))
            self._into(nowhere[:n], by)
            size -= n

    def close(self) -> None:
        """Ends the connection, whoever waits on it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError as exc:  # the other side was first
            _LOG.debug("shutdown: %s", exc)
        self._socket.close()

    def _limit(self, by: float | None) -> None:
        left = STALL_S if by is None else by - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if self._timeout_s is None or not left <= self._timeout_s <= left + _LEEWAY_S:
            self._timeout_s = left + _LEEWAY_S / 2 if left > 2 * _LEEWAY_S else left
            self._socket.settimeout(self._timeout_s)

    def _fill(self) -> bool:
        got = self._socket.recv_into(self._read_ahead)
        self._there = self._read_ahead[:got]
        return got > 0

    def _into(self, view: memoryview, by: float | None) -> None:
        """Fills a place, at first with what was read ahead; what is large is received where it stays."""
        while len(view):
            if not self._there and len(view) < _SMALL_BYTES:
                self._limit(by)
                if not self._fill():
                    raise EOFError
            if self._there:
                n = min(len(view), len(self._there))
                view[:n] = self._there[:n]
                self._there, view = self._there[n:], view[n:]
                continue
            self._limit(by)
            got = self._socket.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]


class BulkServer:
    """Answers calls over data connections.

    Attributes:
        port: the port that it listens on.
    """

    def __init__(self, host: str, answer: Callable[..., tuple[Header, Arrays]], *, security: Security, port: int = 0):
        """Listens.

        Args:
            host: an address of this machine.
            answer: `(stream) -> (header, arrays)`: receives one call from a stream and carries it out.
            security: whom it lets in, besides the ticket.
            port: 0 takes a free one.

        Raises:
            OSError: the port is taken.
        """
        host = host.strip("[]")
        self._answer, self._tls = answer, security.tls(server=True)
        self._listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=64
        )
        self.port = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._tickets: dict[bytes, float] = {}  # and when each ends
        self._streams: set[Stream] = set()
        self._closed = False
        threading.Thread(target=self._accept, name="jdist-bulk", daemon=True).start()

    def ticket(self) -> bytes:
        """Opens one connection, to be handed to a caller whose token was right."""
        ticket, now = secrets.token_bytes(_TICKET_BYTES), time.monotonic()
        with self._lock:
            self._tickets = {t: end for t, end in self._tickets.items() if end > now}
            self._tickets[ticket] = now + TICKET_S
        return ticket

    def stop(self) -> None:
        """Ends, and ends all connections."""
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        self._listener.close()
        for stream in streams:
            stream.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # it was closed
            threading.Thread(target=self._serve, args=(connection,), name="jdist-bulk", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        stream: Stream | None = None
        try:
            connection.settimeout(TICKET_S)
            _tune(connection)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            shown = bytearray(_TICKET_BYTES)
            stream = Stream(connection)
            stream._into(memoryview(shown), time.monotonic() + TICKET_S)
            if not self._admit(stream, bytes(shown)):
                return
            while stream.wait_for_more():
                answer, arrays = self._answer(stream)
                stream.send(answer, arrays)
                del answer, arrays  # nothing is held while it waits
        except (OSError, EOFError, WireError) as exc:
            if not self._closed:
                _LOG.info("a data connection ended: %s", exc or type(exc).__name__)
        finally:
            with self._lock:
                self._streams = {other for other in self._streams if other is not stream}
            connection.close()

    def _admit(self, stream: Stream, shown: bytes) -> bool:
        now = time.monotonic()
        with self._lock:
            found = [ticket for ticket in self._tickets if hmac.compare_digest(ticket, shown)]
            known = bool(found) and self._tickets.pop(found[0]) > now
            if not known or self._closed or len(self._streams) >= MOST_CONNECTIONS:
                _LOG.warning("refused a data connection")
                return False
            self._streams.add(stream)
        return True


class BulkChannel:
    """Data connections to one server, as many as there are calls at the same time.

    Args:
        address: the server's "host:port" under gRPC.
        security: what this process shows, and whom it believes.
        ask: asks the server over gRPC, within so many seconds, for a port and a ticket; None where it has no data connections.
    """

    def __init__(self, address: str, *, security: Security, ask: Callable[[float], tuple[int, bytes] | None]):
        self._address, self._host = address, address.rpartition(":")[0].strip("[]")
        self._ask, self._name, self._tls = ask, security.name, security.tls(server=False)
        self._lock = threading.Lock()
        self._idle: list[Stream] = []
        self._busy: set[Stream] = set()
        self._closed = False
        self._unreachable_until = 0.0

    def begin(
        self, header: Header, arrays: Arrays, expects: Callable[[Header], Sequence[Spec]], timeout_s: float
    ) -> Callable[[], tuple[Header, list[np.ndarray]]] | None:
        """Says something; returns what waits for the answer, or None where no data connection can be had.

        Raises:
            CallFailed: as `Channel.call`; so does what is returned.
        """
        by = time.monotonic() + timeout_s
        stream = self._connected(by)
        if stream is None:
            return None
        with self._failing(stream):
            stream.send(header, arrays, by=by)

        def finish() -> tuple[Header, list[np.ndarray]]:
            with self._failing(stream):
                answer, found = stream.receive(
                    lambda header: () if "failed" in header else expects(header),
                    most_bytes=1 << 40,
                    by=by,
                )
            if "failed" in answer:
                self._drop(stream)
                raise CallFailed(self._address, "refused", str(answer["failed"])[:40])
            with self._lock:
                self._busy.discard(stream)
                if not self._closed:
                    self._idle.append(stream)
            return answer, found

        return finish

    @contextlib.contextmanager
    def _failing(self, stream: Stream) -> Iterator[None]:
        """Whatever goes wrong in the middle of a message is the end of its connection."""
        try:
            yield
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

    def _connected(self, by: float) -> Stream | None:
        with self._lock:
            if self._closed:
                raise CallFailed(self._address, "closed")
            if self._idle:
                self._busy.add(self._idle[-1])
                return self._idle.pop()
        if time.monotonic() < self._unreachable_until:
            return None
        found = self._ask(by - time.monotonic())
        if found is None:
            self._unreachable_until = time.monotonic() + STALL_S
            return None
        port, ticket = found
        try:
            connection = self._opened(port, ticket, min(5.0, by - time.monotonic()))
        except OSError as exc:
            _LOG.warning("%s: no data connection to port %d, gRPC is slower: %s", self._address, port, exc)
            self._unreachable_until = time.monotonic() + STALL_S
            return None
        stream = Stream(connection)
        with self._lock:
            if self._closed:
                stream.close()
                raise CallFailed(self._address, "closed")
            self._busy.add(stream)
        return stream

    def _opened(self, port: int, ticket: bytes, timeout_s: float) -> socket.socket:
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
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
