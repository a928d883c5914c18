"""gRPC's health service, which probes of Kubernetes and load balancers ask; it says that the process serves, and no more.

Its two messages are small, so their code is hand-written: generated code would bring protobuf's runtime,
and with it the conflicts between its versions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc

SERVICE = "grpc.health.v1.Health"
SERVING = b"\x08\x01"  # HealthCheckResponse{status: SERVING}
NOT_SERVING = b"\x08\x02"
SERVICE_UNKNOWN = b"\x08\x03"
WATCH_S = 1.0  # between looks for those that watch
MOST_WATCHES = 4  # each holds a thread; nobody has to show a token for one
_OPTIONS = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 1024)]


def health(*services: str, is_well: Callable[[], bool] = lambda: True) -> grpc.GenericRpcHandler:
    """Makes the health service; probes may ask for "" (the full server) and `services`."""
    # https://github.com/grpc/grpc/blob/master/doc/health-checking.md
    known = {b"", *(bytes([0x0A, len(name)]) + name.encode() for name in services)}
    watches = threading.BoundedSemaphore(MOST_WATCHES)

    def check(request: bytes, context: grpc.ServicerContext) -> bytes:
        if request not in known:
            context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return SERVING if is_well() else NOT_SERVING

    def watch(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        if not watches.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watch already")
        try:
            over = threading.Event()
            if context.add_callback(over.set):
                last = None
                while not over.is_set():
                    now = SERVICE_UNKNOWN if request not in known else SERVING if is_well() else NOT_SERVING
                    if now != last:
                        yield (last := now)
                    over.wait(WATCH_S)
        finally:
            watches.release()

    handlers = {
        "Check": grpc.unary_unary_rpc_method_handler(check),
        "Watch": grpc.unary_stream_rpc_method_handler(watch),
    }
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


def serve_health(address: str, *services: str, is_well: Callable[[], bool] = lambda: True) -> Callable[[], object]:
    """Serves only health, without TLS, for probes; returns a function that ends it."""
    server = grpc.server(futures.ThreadPoolExecutor(2 + MOST_WATCHES, "jdist-health"), options=_OPTIONS)
    server.add_generic_rpc_handlers((health(*services, is_well=is_well),))
    try:
        server.add_insecure_port(address)
    except RuntimeError as exc:
        raise OSError(f"cannot listen on {address}: the port is taken, or the address is not this machine's") from exc
    server.start()
    return lambda: server.stop(0).wait()
