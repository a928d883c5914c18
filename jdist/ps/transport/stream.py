"""Frames messages on a socket: a header, then the bytes of its arrays, received without a copy."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import time

import numpy as np

from jdist.errors import WireError
from jdist.ps.protocol.wire import PREFIX_BYTES, Buffers, as_bytes, body_size, decode_body, encode
from jdist.ps.transport.interface import Answer, Arrays, Expects, Header

_LOG = logging.getLogger(__name__)
STALL_S = 20.0  # without a byte in the middle of a message
_LEEWAY_S = 0.5  # by which a wait may be too long: setting it each time is a system call
_SIZE = struct.Struct(">Q")
_SMALL_BYTES = 1 << 16


class Stream:
    """Messages over a socket."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._read_ahead = memoryview(bytearray(_SMALL_BYTES))
        self._unread = memoryview(b"")
        self._timeout_s = -1.0  # the socket's, as it was set last; -1 before that

    def wait_for_more(self) -> bool:
        """Waits, as long as it takes, until something comes; False if the other side has ended."""
        while not self._unread:
            with contextlib.suppress(TimeoutError):  # to wait without limit takes two more system calls a message
                self._limit(None)
                return self._fill()
        return True

    def send(self, header: Header, arrays: Arrays, *, by: float | None = None) -> None:
        """Sends a message by a monotonic deadline; None: no wait is longer than `STALL_S`."""
        arrays = [np.asarray(x) for x in arrays]
        size = sum(x.nbytes for x in arrays)
        head = _SIZE.pack(size) + encode(header)
        if size <= _SMALL_BYTES:
            head, arrays = b"".join([head, *(x.tobytes() for x in arrays)]), []
        for view in (memoryview(head), *as_bytes(arrays)):
            while len(view):
                self._limit(by)
                view = view[self._socket.send(view) :]

    def receive(self, expects: Expects, *, most_bytes: int, by: float | None = None) -> Answer:
        """Receives a message of at most `most_bytes`; a deadline as in `send`."""
        first = bytearray(_SIZE.size + PREFIX_BYTES)
        self.read_into(memoryview(first), by)
        (size,) = _SIZE.unpack_from(first)
        body = bytearray(body_size(first[_SIZE.size :]))
        self.read_into(memoryview(body), by)
        try:
            header = decode_body(body)
            buffers = Buffers(expects(header), most_bytes=most_bytes)
            if buffers.size_bytes != size:
                raise WireError(f"{size:,} bytes where {buffers.size_bytes:,} are expected")
        except WireError:
            self._skip(min(size, most_bytes), by)  # so that the other side reads why
            raise
        for view in buffers.views:
            self.read_into(view, by)
        return header, buffers.filled()

    def _skip(self, size: int, by: float | None) -> None:
        nowhere = memoryview(bytearray(min(size, _SMALL_BYTES)))
        while size:
            n = min(size, len(nowhere))
            self.read_into(nowhere[:n], by)
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
        if not left <= self._timeout_s <= left + _LEEWAY_S:
            self._timeout_s = left + _LEEWAY_S / 2 if left > 2 * _LEEWAY_S else left
            self._socket.settimeout(self._timeout_s)

    def _fill(self) -> bool:
        got = self._socket.recv_into(self._read_ahead)
        self._unread = self._read_ahead[:got]
        return got > 0

    def read_into(self, view: memoryview, by: float | None) -> None:
        """Fills a view: from what was read ahead first, then from the socket; what is large without a copy in between."""
        while len(view):
            if not self._unread and len(view) < _SMALL_BYTES:
                self._limit(by)
                if not self._fill():
                    raise EOFError
            if self._unread:
                n = min(len(view), len(self._unread))
                view[:n] = self._unread[:n]
                self._unread, view = self._unread[n:], view[n:]
                continue
            self._limit(by)
            got = self._socket.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]
