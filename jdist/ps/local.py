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
from jdist.ps.security import AUTHORITY, CERTIFICATE, KEY
from jdist.ps.serve import PS, READY, WORKER, Role

START_S = 60.0
END_S = 10.0
MOST_RESTARTS = 10  # without having served for long between
LONG_S = 60.0
_LOG = logging.getLogger(__name__)


class LocalCluster:
    """Processes of `jdist serve` on loopback; they end with this process, however it ends.

    Attributes:
        workers: addresses of the workers.
        ps: addresses of the parameter servers.
        token: the secret that all of them share.
    """

    def __init__(self, *, workers: int, ps: int, grace_s: float = 60.0):
        """Starts them, and waits until they listen.

        Args:
            workers: how many workers.
            ps: how many parameter servers.
            grace_s: seconds without a call after which one ends.

        Raises:
            LaunchError: one of them did not come up; says what it wrote.
        """
        self.token, self._grace_s = secrets.token_hex(16), grace_s
        self._processes: list[subprocess.Popen[str]] = []
        self._closed = threading.Event()
        self._finalizer = weakref.finalize(self, _end, self._processes, self._closed)
        roles = (PS,) * ps + (WORKER,) * workers
        try:
            for role in roles:
                self._processes.append(_start(role, grace_s, self.token))
            addresses = [_address(p, role) for p, role in zip(self._processes, roles, strict=True)]
        except BaseException:
            self.close()
            raise
        self.ps, self.workers = addresses[:ps], addresses[ps:]
        keeping = functools.partial(_keep, self._processes, self._closed, restart=self._restarter(addresses, ps))
        threading.Thread(target=keeping, daemon=True, name="jdist-keep").start()

    def _restarter(self, addresses: Sequence[str], ps: int) -> Callable[[int], subprocess.Popen[str]]:
        """Starts the process of a number again, under its address; holds on to nothing of this object."""
        token, grace_s = self.token, self._grace_s

        def restart(number: int) -> subprocess.Popen[str]:
            role: Role = PS if number < ps else WORKER
            process = _start(role, grace_s, token, addresses[number])
            _address(process, role)
            return process

        return restart

    def close(self) -> None:
        """Ends them; done by itself when the object or the process is gone."""
        self._closed.set()
        self._finalizer()

    @property
    def pids(self) -> list[int]:
        """Process ids: first of the parameter servers, then of the workers."""
        return [p.pid for p in self._processes]


def _start(role: Role, grace_s: float, token: str, address: str = "127.0.0.1:0") -> subprocess.Popen[str]:
    # Certificates are for a cluster, and hold other names than 127.0.0.1.
    environ = {k: v for k, v in os.environ.items() if k not in (CERTIFICATE, KEY, AUTHORITY)} | {TOKEN: token}
    if role == PS:  # updates are made in the host's memory; an accelerator is the workers'
        environ["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, "-m", "jdist", "serve", "--role", role, "--address", address]
    return subprocess.Popen(
        [*command, "--grace-s", str(grace_s), "--with-parent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )


def _address(process: subprocess.Popen[str], role: Role) -> str:
    """What a process says it listens on."""
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    assert process.stdout is not None  # it is a pipe
    lines = process.stdout

    def read() -> None:
        with lines:
            for line in lines:
                said.put(line)
        said.put("")

    threading.Thread(target=read, daemon=True, name="jdist-serve-output").start()
    beginning, end = READY.format(role=role, address=""), time.monotonic() + START_S
    while True:
        try:
            line = said.get(timeout=max(0.1, end - time.monotonic()))
        except queue.Empty:
            raise LaunchError(f"a {role} did not listen within {START_S:g} s") from None
        if line.startswith(beginning):
            return line.removeprefix(beginning).strip()
        if not line:
            raise LaunchError(
                f"a {role} ended with exit code {process.wait()} before it listened; see what it wrote above"
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
