"""The transport between processes: gRPC with generic handlers, and data connections for what is large."""

from __future__ import annotations

import functools
import hmac
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Unpack

import grpc
import numpy as np

from jdist.errors import WireError
from jdist.ps.protocol.wire import CHUNK_BYTES, MOST_HEADER_BYTES, Buffers, Spec, chunks, decode, encode
from jdist.ps.transport import interface
from jdist.ps.transport.bulk import BulkChannel, BulkServer
from jdist.ps.transport.health import MOST_WATCHES, health
from jdist.ps.transport.interface import (
    Answer,
    Arrays,
    CallFailed,
    CallOptions,
    Channel,
    Expects,
    Header,
    Method,
    Methods,
)
from jdist.ps.transport.security import OPEN
from jdist.ps.transport.security import Security as Security
from jdist.ps.transport.stream import Stream

_LOG = logging.getLogger(__name__)
SERVICE = "jdist.ps.v1"
_TOKEN = "jdist-token"
_DATA = "data connection"  # the method that hands out tickets
MOST_S = 24 * 3600.0  # that a call may take
_MOST_MESSAGE_BYTES = MOST_HEADER_BYTES + CHUNK_BYTES + 1024
_OPTIONS = [
    ("grpc.max_send_message_length", _MOST_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MOST_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # else a second server on a taken port would share its calls
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
]
# A connection over a cut link is given up while a call waits: TCP may try it again only 30 s after the link is mended.
_CHANNEL_OPTIONS = [*_OPTIONS, ("grpc.keepalive_time_ms", 5_000), ("grpc.keepalive_timeout_ms", 5_000)]
_SERVER_OPTIONS = [
    # A caller that has gone without a word keeps no connection: a cut link sends no end. A bound on
    # idle connections would take those that are wanted as well, and 1.5 % of every small call.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),  # callers' keepalive, see above
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
]


class RpcServer:
    """Serves methods over gRPC."""

    def __init__(
        self,
        address: str,
        methods: Methods,
        *,
        security: Security = OPEN,
        threads: int = 16,
        most_bytes: int = 4 << 30,
    ):
        """Listens on "host:port" (port 0: a free one)."""
        # `threads` calls run at the same time; `most_bytes` limits one call's arrays.
        self._token, self._most_bytes = security.token, most_bytes
        self._methods = dict(methods)
        self._lock, self._num_running, self._ended_at_s = threading.Lock(), 0, time.monotonic()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(threads + MOST_WATCHES, thread_name_prefix="jdist-rpc"),
            options=[*_OPTIONS, *_SERVER_OPTIONS],
        )
        handlers = {
            "Call": grpc.unary_unary_rpc_method_handler(self._call),
            "Bulk": grpc.stream_stream_rpc_method_handler(self._answer),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers), health(SERVICE, is_well=lambda: self.is_well))
        )
        try:
            if security.key is None or security.certificate is None:
                self.port = self._server.add_insecure_port(address)
            else:
                pair = security.key, security.certificate
                credentials = grpc.ssl_server_credentials([pair], security.authority, require_client_auth=True)
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as exc:
            raise OSError(
                f"cannot listen on {address}: the port is taken, or the address is not this machine's"
            ) from exc
        self._data = data = BulkServer(address.rpartition(":")[0], self._answer_bulk, security=security)
        self._methods[_DATA] = Method(
            lambda header, arrays: ({"port": data.port, "name": data.name, "ticket": data.ticket()}, [])
        )
        self._server.start()

    @property
    def is_well(self) -> bool:
        """Returns whether it can serve new callers at the moment."""
        return not self._data.full

    @property
    def silent_s(self) -> float:
        """Seconds since the last call of a method ended; 0 while one is under way."""
        with self._lock:
            return 0.0 if self._num_running else time.monotonic() - self._ended_at_s

    def stop(self, grace_s: float = 0.0) -> bool:
        """Ends; calls under way may take `grace_s` more seconds. Returns whether those of data connections have ended."""
        self._server.stop(grace_s).wait()
        return self._data.stop()

    def _call(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        return next(iter(self._answer(iter([request]), context)))

    def _answer(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answers the frames of a call. Of what is wrong with it the caller learns one word; the log here has the rest."""
        self._check_token(context)
        # Without a deadline a call could hold a thread for ever.
        if (context.time_remaining() or math.inf) > MOST_S:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "refused")
        try:
            header, first = decode(next(requests))
            method, specs = self._expected(header)
            buffers = Buffers(specs, most_bytes=self._most_bytes)
            buffers.take(first)
            for chunk in requests:
                buffers.take(chunk)
            arrays = buffers.arrays()
        except (WireError, StopIteration) as exc:
            _log_refusal(exc)
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "refused")
        try:
            answer, results = self._run(method, header, arrays)
        except Exception as exc:  # noqa: BLE001  # grpc would send its text to the caller
            context.abort(grpc.StatusCode.INTERNAL, _failure(exc))
        yield from _frames(answer, results)

    def _answer_bulk(self, stream: Stream, make_room: Callable[[], None]) -> tuple[Header, Arrays]:
        """Answers a call over a data connection, which whoever got a ticket may make."""
        methods: list[Method] = []

        def expects(header: Header) -> Sequence[Spec]:
            method, specs = self._expected(header)
            methods.append(method)
            if method.limited and sum(s.size_bytes for s in specs) > CHUNK_BYTES:
                make_room()
            return specs

        try:
            header, arrays = stream.receive(expects, most_bytes=self._most_bytes)
        except WireError as exc:
            _log_refusal(exc)
            return {"failed": "refused"}, []
        try:
            return self._run(methods[0], header, arrays)
        except Exception as exc:  # noqa: BLE001  # as above
            return {"failed": _failure(exc)}, []

    def _run(self, method: Method, header: Header, arrays: list[np.ndarray]) -> tuple[Header, Arrays]:
        with self._lock:
            self._num_running += 1
        try:
            return method.run(header, arrays)
        finally:
            with self._lock:
                self._num_running -= 1
                self._ended_at_s = time.monotonic()

    def _expected(self, header: Header) -> tuple[Method, list[Spec]]:
        """Returns the method that a header names, and the specs of the arrays that come with it."""
        name = header.pop("method", None)
        method = self._methods.get(name) if isinstance(name, str) else None
        if method is None:
            raise WireError(f"unknown method {str(name)[:40]!r}")
        try:
            return method, list(method.expects(header))
        except WireError:
            raise
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as exc:
            raise WireError(f"a header that makes no sense: {exc!r}") from exc

    def _check_token(self, context: grpc.ServicerContext) -> None:
        shown = dict(context.invocation_metadata()).get(_TOKEN, "")
        if self._token is not None and not hmac.compare_digest(str(shown).encode(), self._token.encode()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")


def _frames(header: Header, arrays: Arrays) -> Iterator[bytes]:
    """Yields header and arrays as gRPC messages; small arrays go with the header."""
    frame = encode(header)
    if sum(np.asarray(x).nbytes for x in arrays) <= CHUNK_BYTES:
        yield frame + b"".join(chunks(arrays))
        return
    yield frame
    for chunk in chunks(arrays):
        yield bytes(chunk)


class RpcChannel(Channel):
    """A connection to an `RpcServer`."""

    def __init__(self, address: str, *, security: Security = OPEN):
        """Connects to "host:port" at the first call."""
        self.peer = address
        self._metadata = ((_TOKEN, security.token),) if security.token is not None else ()
        if security.certificate is None:
            self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(security.authority, security.key, security.certificate)
            named = [("grpc.ssl_target_name_override", security.name)] if security.name else []
            self._channel = grpc.secure_channel(address, credentials, options=[*_CHANNEL_OPTIONS, *named])
        self._small = self._channel.unary_unary(f"/{SERVICE}/Call")
        self._large = self._channel.stream_stream(f"/{SERVICE}/Bulk")
        self._data = BulkChannel(address, security=security, ask=self._ask_for_ticket)
        self._closed = False

    def begin(
        self, method: str, header: Header, arrays: Arrays = (), **options: Unpack[CallOptions]
    ) -> Callable[[], Answer]:
        timeout_s, expects = options["timeout_s"], options.get("expects", interface.no_arrays)
        header = {**header, "method": method}
        bulk = options.get("bulk", False) or sum(np.asarray(x).nbytes for x in arrays) > CHUNK_BYTES
        if bulk or options.get("data", False):
            begun = self._data.begin(header, arrays, expects, timeout_s)
            if begun is not None:
                return begun
        return functools.partial(self._over_grpc, header, arrays, expects, timeout_s, bulk=bulk)

    def _over_grpc(self, header: Header, arrays: Arrays, expects: Expects, timeout_s: float, *, bulk: bool) -> Answer:
        frames = _frames(header, arrays)
        first = next(frames)
        try:
            if not bulk:
                return _received(iter([self._small(first, timeout=timeout_s, metadata=self._metadata)]), expects)
            requests = itertools.chain([first], frames)
            return _received(self._large(requests, timeout=timeout_s, metadata=self._metadata), expects)
        except grpc.RpcError as exc:
            status = exc.code()  # type: ignore[attr-defined]  # what grpc raises is a Call as well
            detail = exc.details() or ""  # type: ignore[attr-defined]  # as above
            reason = interface.EXHAUSTED if detail == interface.EXHAUSTED else _REASONS.get(status, "unavailable")
            raise CallFailed(self.peer, reason, detail) from exc
        except ValueError as exc:  # what grpc says of a channel that was closed
            if not self._closed:
                raise
            raise CallFailed(self.peer, "closed") from exc

    def close(self) -> None:
        self._closed = True
        self._data.close()
        self._channel.close()

    def _ask_for_ticket(self, timeout_s: float) -> tuple[int, str, bytes]:
        answer, _ = self.call(_DATA, {}, timeout_s=timeout_s)
        return answer["port"], str(answer.get("name", "")), answer["ticket"]


_REASONS = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline",
    grpc.StatusCode.UNAUTHENTICATED: "unauthenticated",
    grpc.StatusCode.INVALID_ARGUMENT: "refused",
    grpc.StatusCode.INTERNAL: "refused",
    grpc.StatusCode.UNIMPLEMENTED: "refused",
}


def _failure(exc: Exception) -> str:
    """Logs an error in a method, and returns the one word that the caller learns of it."""
    if isinstance(exc, interface.OutOfFilesError):
        return interface.EXHAUSTED
    try:
        interface.check_files(fresh=True)
    except interface.OutOfFilesError:
        _LOG.exception("a call failed, as no file descriptor is left")
        return interface.EXHAUSTED
    _LOG.error("a call failed", exc_info=exc)
    return "failed"


def _log_refusal(exc: Exception) -> None:
    _LOG.log(
        logging.INFO if isinstance(exc, interface.FailedPrecondition) else logging.WARNING, "refused a call: %s", exc
    )


def _received(answers: Iterator[bytes], expects: Expects) -> Answer:
    header, first = decode(next(answers))
    buffers = Buffers(expects(header), most_bytes=1 << 40)
    buffers.take(first)
    for chunk in answers:
        buffers.take(chunk)
    return header, buffers.arrays()
