"""A transport within one process, for tests: the same bytes, no socket, and faults where a test wants them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Literal, Unpack

from jdist.ps.protocol.wire import Buffers, chunks, decode, encode
from jdist.ps.server.replicated_shard import ReplicatedShard
from jdist.ps.transport.interface import (
    EXHAUSTED,
    Answer,
    Arrays,
    CallFailed,
    CallOptions,
    Channel,
    Expects,
    Header,
    Methods,
    OutOfFilesError,
    no_arrays,
)

Fault = Literal["lose the call", "lose the answer", "twice"]


class FakeServer:
    """Serves methods to channels of the same process."""

    def __init__(self, address: str, methods: Methods, *, most_bytes: int = 1 << 30):
        self.address, self._methods, self._most_bytes = address, methods, most_bytes
        self._stopped = threading.Event()

    def stop(self) -> None:
        """From now on every call fails."""
        self._stopped.set()

    def resume(self) -> None:
        """From now on calls are answered again."""
        self._stopped.clear()

    def answer(self, method: str, frame: bytes, payload: list[bytes]) -> tuple[bytes, list[bytes]]:
        """Answers the bytes of a call."""
        if self._stopped.is_set():
            raise CallFailed(self.address, "unavailable")
        try:
            header, _ = decode(frame)
            buffers = Buffers(self._methods[method].expects(header), most_bytes=self._most_bytes)
            for chunk in payload:
                buffers.take(chunk)
            answer, arrays = self._methods[method].run(header, buffers.arrays())
        except CallFailed:
            raise
        except OutOfFilesError as exc:
            raise CallFailed(self.address, EXHAUSTED) from exc
        except Exception as exc:  # a caller learns nothing of it
            raise CallFailed(self.address, "refused") from exc
        return encode(answer), [bytes(chunk) for chunk in chunks(arrays)]


class FakeChannel(Channel):
    """Calls a `FakeServer`; `fault` chooses a fault for each call's method and header, or None."""

    def __init__(
        self, server: FakeServer, *, fault: Callable[[str, Header], Fault | None] = lambda method, header: None
    ):
        self._server, self._fault, self.peer = server, fault, getattr(server, "address", "")

    def begin(
        self, method: str, header: Header, arrays: Arrays = (), **options: Unpack[CallOptions]
    ) -> Callable[[], Answer]:
        return functools.partial(self._ask, method, header, arrays, options.get("expects", no_arrays))

    def _ask(self, method: str, header: Header, arrays: Arrays, expects: Expects) -> Answer:
        fault = self._fault(method, header)
        if fault == "lose the call":
            raise CallFailed(self.peer, "deadline")
        frame, payload = encode(header), [bytes(chunk) for chunk in chunks(arrays)]
        answer, received = self._server.answer(method, frame, payload)
        if fault == "twice":
            answer, received = self._server.answer(method, frame, payload)
        if fault == "lose the answer":
            raise CallFailed(self.peer, "deadline")
        answer_header, _ = decode(answer)
        buffers = Buffers(expects(answer_header), most_bytes=1 << 30)
        for chunk in received:
            buffers.take(chunk)
        return answer_header, buffers.arrays()

    def close(self) -> None:
        """See `Channel`."""


def only_copy(**options: Any) -> ReplicatedShard:
    """Makes a shard that is given no backup."""
    return ReplicatedShard(lambda address: FakeChannel(None), **options)  # type: ignore[arg-type]  # it is not called
