"""`jdist serve`: a worker or a parameter server that waits for its coordinator."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jdist.errors import LaunchError
from jdist.ps.transport.seam import Header, Method, Methods

Role = Literal["worker", "ps"]
WORKER: Role = "worker"
PS: Role = "ps"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
READY = "jdist serve: {role} listens on {address}"


class LastHeard:
    """When somebody last asked for something, and whether the coordinator has said that it is over."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._under_way = 0
        self._lock = threading.Lock()
        self.over = threading.Event()

    def watch(self, methods: Methods) -> dict[str, Method]:
        """Methods that take note of every call, and one more: "end"."""
        watched = {name: dataclasses.replace(method, run=self._noting(method.run)) for name, method in methods.items()}
        return {**watched, "end": Method(self._end)}

    def silent_s(self) -> float:
        """Seconds since the last call ended; 0 while one is under way."""
        with self._lock:
            return 0.0 if self._under_way else time.monotonic() - self._at

    def _noting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def noting(header: Header, arrays: list[Any]) -> Any:
            with self._lock:
                self._under_way += 1
            try:
                return run(header, arrays)
            finally:
                with self._lock:
                    self._under_way -= 1
                    self._at = time.monotonic()

        return noting

    def _end(self, header: Header, arrays: list[Any]) -> tuple[Header, list[Any]]:
        self.over.set()
        return {}, []


def serve(
    role: Role,
    address: str,
    *,
    token: str | None,
    grace_s: float,
    allow: Sequence[str] = (),
    with_parent: bool = False,
) -> int:
    """Serves until the coordinator says that it is over, or nobody has asked for anything for `grace_s`.

    Args:
        role: "worker" or "ps".
        address: "host:port" to listen on; port 0 takes a free one.
        token: what callers must show, and what this worker shows to the parameter servers.
        grace_s: seconds without a call after which it ends.
        allow: custom calls that received functions may have.
        with_parent: end as well when standard input is closed, as it is when the parent process dies.

    Returns:
        The exit code: 0 when told to end, 75 when nobody asked for anything any more.

    Raises:
        OSError: the port is taken.
        LaunchError: the address is not of loopback.
    """
    from jdist.cluster.exit_codes import FINISHED, PEER_LOST
    from jdist.ps.keeper import Keeper
    from jdist.ps.memory import keep_freed_memory
    from jdist.ps.transport.rpc import RpcChannel, RpcServer, Security
    from jdist.ps.worker import WorkerServer

    host = address.rpartition(":")[0]
    if host not in LOOPBACK:
        raise LaunchError(
            f"--address is {address!r}; it must be of loopback ({', '.join(LOOPBACK)}), as what is said is not encrypted yet."
        )
    keep_freed_memory()
    security, heard = Security(token=token), LastHeard()
    worker = WorkerServer(lambda to: RpcChannel(to, security=security), allow=allow) if role == WORKER else None
    methods = Keeper(allow=allow).methods() if worker is None else worker.methods()
    server = RpcServer(address, heard.watch(methods), security=security)
    print(READY.format(role=role, address=f"{host}:{server.port}"), flush=True)
    if with_parent:
        threading.Thread(target=_until_closed, args=(heard.over,), daemon=True).start()
    try:
        while not heard.over.wait(min(1.0, grace_s)):
            if heard.silent_s() > grace_s:
                print(f"jdist serve: {role} heard from nobody for {grace_s:g} s, it ends", file=sys.stderr, flush=True)
                return PEER_LOST
        return FINISHED
    finally:
        server.stop(1.0)
        if worker is not None:
            worker.close()


def _until_closed(over: threading.Event) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    over.set()
