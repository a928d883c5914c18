"""`WorldsHost`: the process that hosts the worlds of a job which goes on without lost processes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from jdist.cluster.address import split
from jdist.launcher.events import Event, Fenced, JobEnded, Settings, World

_START_S, _POLL_S, _END_S, _PROBE_S = 60.0, 0.05, 5.0, 2.0


class WorldsHost:
    """A process of `jdist.cluster.worlds.host` at an address of this machine; it ends with this one."""

    def __init__(self, settings: Settings, address: str, environ: Mapping[str, str], log: Path):
        command = [sys.executable, "-m", "jdist.cluster.worlds.host", str(settings.smallest), str(settings.largest)]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [*command, "--address", address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environ),
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._log, self._rest = log, b""
        self.pipe = self._process.stdout.fileno()

    def address(self, is_asked: Callable[[], bool]) -> str:
        """Waits for its first line, the address to which processes connect."""
        deadline = time.monotonic() + _START_S
        while b"\n" not in self._rest:
            if is_asked():
                raise OSError("asked to stop before the host of the job's worlds was there")
            is_there = bool(select.select([self.pipe], [], [], _POLL_S)[0])
            data = os.read(self.pipe, 1 << 16) if is_there else b""
            if (is_there and not data) or time.monotonic() >= deadline:
                raise OSError(f"the host of the job's worlds did not start; its log: {self._log}")
            self._rest += data
        first, self._rest = self._rest.split(b"\n", 1)
        os.set_blocking(self.pipe, False)
        return json.loads(first)["address"]

    def read(self) -> tuple[list[Event], bool]:
        """Reads the news; also returns whether more may follow."""
        at = time.monotonic()
        try:
            data = os.read(self.pipe, 1 << 16)
        except BlockingIOError:
            return [], True
        *lines, self._rest = (self._rest + data).split(b"\n")
        events: list[Event] = []
        for line in map(json.loads, lines):
            match line:
                case {"world": int(generation), "numbers": list(numbers)}:
                    events.append(World(at=at, generation=generation, numbers=frozenset(numbers)))
                case {"fence": int(number)}:
                    events.append(Fenced(at=at, number=number))
                case {"end": str(why)}:
                    events.append(JobEnded(at=at, why=why))
        return events if data else [*events, JobEnded(at=at, why="")], bool(data)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def is_reachable(address: str) -> bool:
    """Returns whether something listens at an address."""
    try:
        socket.create_connection(split(address), _PROBE_S).close()
    except OSError:
        return False
    return True


def own_address(towards: str) -> str:
    """Finds the address of this machine on the way to another one."""
    host, port = split(towards)
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]
