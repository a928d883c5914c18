"""A process of a job in a Ray actor, as the launcher sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jdist.launcher.console import Console
from jdist.launcher.exit_cause import Task
from jdist.launcher.output import Controlled, LogFile

ANSWER_S = 60.0  # for an actor to answer, which it does within a second
_GONE_S = 10.0


class ActorProcess(Controlled):
    """A process that a Ray actor runs; if the actor is gone, its guard has killed the process."""

    # `line`, `variables` and `folder` as for `Place.start`, the rest as for `Controlled`.

    def __init__(
        self,
        ray: Any,
        actor: Any,
        task: Task,
        line: Sequence[str],
        variables: Mapping[str, str],
        folder: str,
        *,
        log: LogFile,
        prefixes: tuple[bytes, bytes],
        console: Console,
    ) -> None:
        self._ray, self._actor = ray, actor
        try:
            ray.get(actor.start.remote(list(line), dict(variables), folder), timeout=ANSWER_S)
        except ray.exceptions.RayError as exc:
            raise OSError(f"{task} cannot be started by its Ray actor: {first_line(exc)}") from exc
        control, self._end = socket.socketpair()
        (out, self._out), (err, self._err) = os.pipe(), os.pipe()
        super().__init__(task, control, (out, err), log=log, prefixes=prefixes, console=console)
        self._code = -int(signal.SIGKILL)
        self._thread = threading.Thread(target=self._follow, name=f"Ray actor of {task}", daemon=True)
        self._thread.start()

    def send(self, number: signal.Signals) -> None:
        self._actor.send.remote(int(number))

    def listen(self) -> bool:
        try:
            return not self.control.recv(1)
        except BlockingIOError:
            return False

    def finish(self, now: float) -> tuple[int, float]:
        self._thread.join(_GONE_S)
        self.read_rest(now)
        self._close()
        return self._code, now

    def abandon(self) -> None:
        self._kill()
        self._thread.join(_GONE_S)
        self._close()

    def _follow(self) -> None:
        """Passes on the output until the process or its actor is gone."""
        try:
            code = None
            while code is None:
                out, err, code = self._ray.get(self._actor.read.remote(), timeout=ANSWER_S)
                _write(self._out, out)
                _write(self._err, err)
            self._code = int(code)
        except self._ray.exceptions.RayError as exc:
            self._kill()  # one that only does not answer
            with contextlib.suppress(BrokenPipeError):  # as below
                _write(self._err, f"jdist: the Ray actor of {self.task} is gone: {first_line(exc)}\n".encode())
        except BrokenPipeError:  # the launcher has abandoned it
            pass
        finally:
            os.close(self._out)
            os.close(self._err)
            self._end.close()

    def _kill(self) -> None:
        self._ray.kill(self._actor, no_restart=True)

    def _close(self) -> None:
        self._kill()
        self.control.close()
        for stream in self.streams:
            os.close(stream.pipe)
        self.log.close()


def first_line(exc: BaseException) -> str:
    """The first line of an error of Ray, which has many."""
    return next((line.strip().rstrip(".:") for line in str(exc).splitlines() if line.strip()), type(exc).__name__)


def _write(pipe: int, data: bytes) -> None:
    while data:
        data = data[os.write(pipe, data) :]
