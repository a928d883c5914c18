"""`Place`: a process of a job on an engine's node, under the launcher's guard."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from jdist.cluster.address import join
from jdist.cluster.environment import RECORD_FOLDER
from jdist.launcher.environment import OF_CLUSTER, free_ports
from jdist.launcher.process import end_of, start_guard

_CHUNK = 1 << 16
POLL_S = 1.0


class Place:
    """A place for one process, with its address, start, output and end."""

    # The process is gone with this object's process: its guard kills all that it started. A thread
    # may `send` while another waits in `read`.

    def __init__(self, host: str):
        self._host = host
        self._control: socket.socket | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._said = b""

    def address(self) -> str:
        """Finds an address of this node whose port is free, as is the next."""
        return join(self._host, free_ports(1)[0])

    def start(self, line: Sequence[str], variables: Mapping[str, str], folder: str) -> None:
        """Starts the process in `folder`, if that exists."""
        # The launcher's `sys.executable` comes as "", and becomes this node's. `variables` are
        # added to this node's environment, without variables of another cluster.
        environ = {name: value for name, value in os.environ.items() if name not in OF_CLUSTER} | dict(variables)
        if not os.path.isdir(environ.get(RECORD_FOLDER, "")):
            environ.pop(RECORD_FOLDER, None)  # it is on the launcher's machine alone
        self._guard, self._control = start_guard(
            [part or sys.executable for part in line], environ, folder=folder if os.path.isdir(folder) else None
        )
        self._control.setblocking(False)
        self._selector.register(self._control, selectors.EVENT_READ, None)
        for number, pipe in enumerate((self._guard.stdout, self._guard.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe.fileno(), selectors.EVENT_READ, number)

    def send(self, number: int) -> None:
        """Sends a signal to the process, through its guard."""
        if self._control is not None:
            with contextlib.suppress(OSError):  # it is gone; its end will be read
                self._control.send(bytes([number]))

    def read(self) -> tuple[bytes, bytes, int | None]:
        """Waits a moment for output; returns stdout, stderr, and the exit code or None."""
        # The exit code is minus the number of the signal that killed the process.
        output = [b"", b""]
        is_gone = False
        for key, _ in self._selector.select(POLL_S):
            if key.data is None:
                is_gone = self._listen()
            else:
                output[key.data] += self._take(key.fd)
        if not is_gone:
            return output[0], output[1], None
        assert self._guard is not None
        assert self._control is not None
        code, _ = end_of(self._guard, self._said)
        for key in list(self._selector.get_map().values()):
            while data := self._take(key.fd):
                output[key.data] += data
        self._selector.close()
        self._control.close()
        for pipe in (self._guard.stdout, self._guard.stderr):
            if pipe is not None:
                pipe.close()
        return output[0], output[1], code

    def _listen(self) -> bool:
        """Reads from the guard; returns whether it is gone."""
        assert self._control is not None
        try:
            data = self._control.recv(4096)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._said += data
        if not data:
            self._selector.unregister(self._control)
        return not data

    def _take(self, pipe: int) -> bytes:
        try:
            data = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return b""
        if not data:
            self._selector.unregister(pipe)
        return data
