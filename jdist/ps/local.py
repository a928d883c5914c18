"""Workers and parameter servers as processes of this machine, for a script or a notebook without a cluster."""

from __future__ import annotations

import functools
import logging
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from jdist.cluster.environment import TOKEN
from jdist.errors import LaunchError
from jdist.ps.coordinator.servers import Servers
from jdist.ps.serve import PS, READY, WORKER, Role
from jdist.ps.transport.grpc_transport import RpcChannel
from jdist.ps.transport.security import AUTHORITY, CERTIFICATE, KEY, Security
from jdist.support.xla import CPU_DEVICES, with_flags

START_S = 60.0
END_S = 10.0
MOST_RESTARTS = 10  # without having served for long between
LONG_S = 60.0
_LOG = logging.getLogger(__name__)


def local_servers(workers: int, ps: int, devices_per_worker: int | None) -> Servers:
    """Starts processes of `jdist serve` on loopback; they end with the returned object or with this process, never before."""
    # `devices_per_worker` counts virtual CPU devices; None: all devices that JAX finds.
    token, closed = secrets.token_hex(16), threading.Event()
    roles: tuple[Role, ...] = (PS,) * ps + (WORKER,) * workers
    processes: list[subprocess.Popen[str]] = []
    try:
        for role in roles:
            processes.append(_start(role, "127.0.0.1:0", token, devices_per_worker))
        addresses = [_address(p, role) for p, role in zip(processes, roles, strict=True)]
    except BaseException:
        _end(processes, closed)
        raise

    def restart(number: int) -> subprocess.Popen[str]:
        process = _start(roles[number], addresses[number], token, devices_per_worker)
        _address(process, roles[number])
        return process

    keeping = functools.partial(_keep, processes, closed, restart=restart)
    threading.Thread(target=keeping, daemon=True, name="jdist-keep").start()
    security = Security(token=token)
    servers = Servers(
        workers=tuple(addresses[ps:]),
        ps=tuple(addresses[:ps]),
        connect=lambda address: RpcChannel(address, security=security),
        close=functools.partial(_end, processes, closed),
        processes=lambda: tuple(p.pid for p in processes),
        running_workers=lambda: tuple(p.pid for p in processes[ps:] if p.poll() is None),
    )
    weakref.finalize(servers, _end, processes, closed)
    return servers


def _start(role: Role, address: str, token: str, devices: int | None) -> subprocess.Popen[str]:
    # In a session of their own: Ctrl-C is for the program, which may want to fetch the state then.
    return subprocess.Popen(
        _command(role, address),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(role, token, devices),
        start_new_session=True,
    )


def _command(role: Role, address: str) -> list[str]:
    command = [sys.executable, "-m", "jdist", "serve", "--role", role, "--address", address]
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    # It is run there only if a dataset function of it is asked for.
    if role == WORKER and script is not None and os.path.isfile(script):
        command += ["--script", os.path.abspath(script)]
    return [*command, "--with-parent"]


def _environment(role: Role, token: str, devices: int | None) -> dict[str, str]:
    """Returns a server's environment: the program's own, but for what concerns devices and certificates."""
    # Certificates are for a cluster, and hold other names than 127.0.0.1.
    environ = {k: v for k, v in os.environ.items() if k not in (CERTIFICATE, KEY, AUTHORITY)} | {TOKEN: token}
    if role == PS:  # updates are made in the host's memory; an accelerator is the workers'
        environ["JAX_PLATFORMS"] = "cpu"
    # As many virtual CPU devices as are asked for, whatever the program itself has.
    count = devices if role == WORKER and devices else 1
    environ["XLA_FLAGS"] = with_flags(environ.get("XLA_FLAGS", ""), {CPU_DEVICES: str(count)})
    environ.pop("JAX_NUM_CPU_DEVICES", None)
    if devices is not None and role == WORKER:
        environ["JAX_PLATFORMS"] = "cpu"
    environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several workers may share a GPU
    return environ


def _address(process: subprocess.Popen[str], role: Role) -> str:
    """Waits until a process says where it listens, and returns the address."""
    output: queue.SimpleQueue[str] = queue.SimpleQueue()
    assert process.stdout is not None  # it is a pipe
    lines = process.stdout

    def read() -> None:
        with lines:
            for line in lines:
                output.put(line)
        output.put("")

    threading.Thread(target=read, daemon=True, name="jdist-serve-output").start()
    beginning, end = READY.format(role=role, address=""), time.monotonic() + START_S
    while True:
        try:
            line = output.get(timeout=max(0.1, end - time.monotonic()))
        except queue.Empty:
            raise LaunchError(
                f"a {role} did not listen within {START_S:g} s. See its output above, or start fewer workers."
            ) from None
        if line.startswith(beginning):
            return line.removeprefix(beginning).strip()
        if not line:
            raise LaunchError(
                f"a {role} ended with exit code {process.wait()} before it listened; see its output above"
            )


def _keep(
    processes: list[subprocess.Popen[str]],
    closed: threading.Event,
    *,
    restart: Callable[[int], subprocess.Popen[str]],
) -> None:
    """Starts again what has ended, until all are to end; one that ends again and again after ever longer waits."""
    ended, next_at = [0] * len(processes), [0.0] * len(processes)
    began, runs = [time.monotonic()] * len(processes), [True] * len(processes)
    while not closed.wait(0.2):
        for number, process in enumerate(processes):
            if process.poll() is None:
                continue
            if runs[number] and time.monotonic() - began[number] > LONG_S:
                ended[number] = 0
            runs[number] = False
            if ended[number] == MOST_RESTARTS or time.monotonic() < next_at[number]:
                continue
            ended[number] += 1
            next_at[number] = time.monotonic() + min(30.0, 2.0 ** ended[number])
            if process.stdin is not None:
                process.stdin.close()
            try:
                processes[number] = restart(number)
                began[number], runs[number] = time.monotonic(), True
            except LaunchError as exc:
                _LOG.warning("%s", exc)
    _end(processes, closed)  # also what was started while the others were ended


def _end(processes: Sequence[subprocess.Popen[str]], closed: threading.Event) -> None:
    closed.set()
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()
    end = time.monotonic() + END_S
    for process in processes:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
