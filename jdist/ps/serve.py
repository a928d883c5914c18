"""`jdist serve`: a worker or a parameter server that waits for its coordinator."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jdist.cluster import failpoints
from jdist.cluster.address import join, split
from jdist.cluster.exit_status import FINISHED, PEER_LOST, PREEMPTED
from jdist.cluster.listen import numeric_address
from jdist.cluster.resolvers.tf_config import tf_config
from jdist.errors import LaunchError, PortInUseError, WireError
from jdist.ps.transport.interface import Header, Method
from jdist.ps.transport.security import Security, how_to_protect, open_to_others
from jdist.support import checks

Role = Literal["worker", "ps"]
WORKER: Role = "worker"
PS: Role = "ps"
# Set in a worker's process, so that a script without a guard starts nothing in it.
IS_SERVER = "JDIST_IS_SERVER"
READY = "jdist serve: {role} listens on {address}"
_LOG = logging.getLogger(__name__)
_LOOK_S = 1.0
_MOST_ADDRESSES = 4096
_REACH_S = 5.0
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # of glibc's malloc.h
_KEPT = (1 << 31) - 1  # bytes; the largest that it takes
_PAD = 32 << 20


def place(role: str | None, address: str | None, environ: Mapping[str, str]) -> tuple[Role, str]:
    """Returns the role and the listening address: from the flags, else from TF_CONFIG."""
    spec = None if role is not None and address is not None else tf_config(environ)
    task: Role | None = None if role is None else checks.choice("--role", role, (WORKER, PS), LaunchError)
    if task is None and spec is not None:
        if spec.task_type not in ("worker", "ps"):
            raise LaunchError(
                f"TF_CONFIG says that this process is the {spec.task_type}, which runs your program, not `jdist serve`. For a "
                "server whatever TF_CONFIG says, give --role and --address."
            )
        task = PS if spec.task_type == "ps" else WORKER
    if task is None:
        raise LaunchError("the role is missing: set TF_CONFIG, or give --role worker or --role ps.")
    if address is None and spec is not None and spec.task_type == task:
        if spec.address is None:
            raise LaunchError(
                f"TF_CONFIG does not say where {spec.task_type} {spec.task_index} listens; give --address."
            )
        host, port = split(spec.address)
        return task, join(numeric_address(host, environ, owner=f"{spec.task_type} {spec.task_index}"), port)
    return task, "127.0.0.1:0" if address is None else address


def serve(
    role: Role,
    address: str,
    *,
    security: Security,
    grace_s: float,
    allow: Sequence[str] = (),
    with_parent: bool = False,
    insecure: bool = False,
    health_address: str | None = None,
    script: str | None = None,
    leave: Callable[[int], object] = lambda code: None,
) -> int:
    """Serves until the coordinator ends it, or for `grace_s` without calls; returns 0 or 75."""
    # With `with_parent` it ends with its parent instead. If a call still runs at the end, `leave`
    # ends the process by an exit code: the interpreter's own end would abort it.
    if grace_s != math.inf:  # it waits without end
        checks.seconds("--grace-s", grace_s, LaunchError)
    if script is not None and not Path(script).is_file():
        raise LaunchError(f"--script is {script!r}; it must be an existing file.")
    _check(address, security, insecure=insecure)
    if health_address is not None:
        _check_form("--health-address", health_address)
    parent = os.getppid()
    if role == PS:  # updates are made in the host's memory; an accelerator is the workers'
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jdist.ps.program import trial
    from jdist.ps.server.replicated_shard import ReplicatedShard, slots
    from jdist.ps.transport.grpc_transport import SERVICE, RpcChannel, RpcServer
    from jdist.ps.transport.health import serve_health
    from jdist.ps.worker.server import WorkerServer

    trial.start_as_fork()
    keep_freed_memory()
    failpoints.arm(0, os.environ)
    over, worker = threading.Event(), None
    if role == WORKER:
        os.environ[IS_SERVER] = "1"
        worker = WorkerServer(lambda to: RpcChannel(to, security=security), allow=allow, script=script)
    # Its own shard, and the backup of another's.
    copies = [ReplicatedShard(lambda to: RpcChannel(to, security=security), allow=allow) for _ in range(2)]
    methods = slots(copies) if worker is None else {**worker.methods(), "reach": _reach(security)}

    def end_server(header: Header, arrays: list[Any]) -> tuple[Header, list[Any]]:
        over.set()
        return {}, []

    code = FINISHED

    def stop(kind: type[BaseException] | None, exc: BaseException | None, _: object) -> None:
        if not server.stop(1.0) and (exc is None or isinstance(exc, SystemExit)):
            leave(code if exc is None else PREEMPTED)

    with contextlib.ExitStack() as ends, _ended_by_sigterm():
        for end in [copy.close for copy in copies] if worker is None else [worker.close]:
            ends.callback(end)
        try:
            server = RpcServer(address, {**methods, "end": Method(end_server)}, security=security)
            ends.push(stop)
            if health_address is not None:
                ends.callback(serve_health(health_address, SERVICE, is_well=lambda: server.is_well))
        except OSError as exc:
            raise PortInUseError(
                f"this {role} {exc}. An earlier server may still be there; else give another."
            ) from exc
        print(READY.format(role=role, address=join(split(address)[0], server.port)), flush=True)
        if with_parent:
            threading.Thread(target=_until_closed, args=(over,), daemon=True).start()
        while not over.wait(min(_LOOK_S, grace_s)):
            if with_parent:
                # What the parent has forked may live on, and hold the other end of standard input.
                if os.getppid() != parent:
                    return code
            elif server.silent_s > grace_s:
                print(f"jdist serve: {role} ends after {grace_s:g} s without a call", file=sys.stderr, flush=True)
                code = PEER_LOST
                return code
        return code


def keep_freed_memory() -> bool:
    """Makes freed memory stay with this process for the next step; returns whether glibc could."""
    # By default glibc returns large blocks at once, and each step gets them page by page again.
    # That costs more than to compute gradients in them.
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError) as exc:
        _LOG.debug("the C library has no mallopt: %s", exc)
        return False
    settings = {_MMAP_MAX: 0, _TRIM_THRESHOLD: _KEPT, _TOP_PAD: _PAD, _ARENA_MAX: 1}
    return all([mallopt(name, value) for name, value in settings.items()])


def _check(address: str, security: Security, *, insecure: bool) -> None:
    _check_form("--address", address)
    host, port = split(address)
    # What counts is the address that the name leads to.
    wrong = open_to_others([join(numeric_address(host, os.environ, owner="this server"), port)], security)
    if wrong is not None and not insecure:
        raise LaunchError(
            f"the address is {address!r}. {wrong} {how_to_protect(security)} Or listen on 127.0.0.1; or, in a network that "
            "is yours alone, say --insecure."
        )
    if wrong is not None:
        print(f"jdist serve: insecure: {wrong}", file=sys.stderr, flush=True)


def _check_form(flag: str, address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) <= 65535) or (
        ":" in host and not (host.startswith("[") and host.endswith("]"))
    ):
        raise LaunchError(f"{flag} is {address!r}; it must be host:port, as 127.0.0.1:2222 or [::1]:2222.")


def _reach(security: Security) -> Method:
    """Makes the method that tries to reach other servers, as only this process can tell whether it is let in there."""
    from jdist.ps.transport.diagnose import reach_all

    def run(header: Header, arrays: list[Any]) -> tuple[Header, list[Any]]:
        addresses = header.get("addresses")
        if not isinstance(addresses, list) or len(addresses) > _MOST_ADDRESSES:
            raise WireError(f"`addresses` must be a list of at most {_MOST_ADDRESSES}")
        for address in addresses:
            _check_form("an address", str(address))
        diagnoses = reach_all([str(a) for a in addresses], security, _REACH_S, sends_programs=False)
        return {"found": [None if d is None else [d.text, d.lasts] for d in diagnoses]}, []

    return Method(run)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block by `SystemExit`; outside the main thread signals are somebody else's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        sys.exit(PREEMPTED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _until_closed(over: threading.Event) -> None:
    # Not by `sys.stdin`: Python wants its lock at the end, and this thread may wait until then.
    with contextlib.suppress(OSError):  # a terminal that was hung up, for instance
        while os.read(0, 4096):
            pass
    over.set()
