"""Workers and parameter servers as processes of this machine, for a script or a notebook without a cluster."""

from __future__ import annotations

import os
import queue
import secrets
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence

from jdist.errors import LaunchError
from jdist.ps.serve import PS, READY, WORKER, Role

START_S = 60.0
END_S = 10.0


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
        self.token = secrets.token_hex(16)
        self._processes: list[subprocess.Popen[str]] = []
        self._finalizer = weakref.finalize(self, _end, self._processes)
        roles = (PS,) * ps + (WORKER,) * workers
        try:
            for role in roles:
                self._processes.append(self._start(role, grace_s))
            addresses = [_address(p, role) for p, role in zip(self._processes, roles, strict=True)]
        except BaseException:
            self.close()
            raise
        self.ps, self.workers = addresses[:ps], addresses[ps:]

    def close(self) -> None:
        """Ends them; done by itself when the object or the process is gone."""
        self._finalizer()

    @property
    def pids(self) -> list[int]:
        """Process ids: first of the parameter servers, then of the workers."""
        return [p.pid for p in self._processes]

    def _start(self, role: Role, grace_s: float) -> subprocess.Popen[str]:
        environ = {**os.environ, "JDIST_TOKEN": self.token}
        if role == PS:  # updates are made in the host's memory; an accelerator is the workers'
            environ["JAX_PLATFORMS"] = "cpu"
        command = [sys.executable, "-m", "jdist", "serve", "--role", role, "--address", "127.0.0.1:0"]
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


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
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
