"""A command in a process of its own, which gets this process's signals and ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jdist.launcher.process import GuardPipe
from jdist.report.files import writing


class Stop:
    """A wish to stop, by Ctrl-C or SIGTERM; it is handed on to the running command."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._pass_on: Callable[[signal.Signals], None] | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listens while the block runs: the first signal is passed on, a second one kills."""

        def on_signal(number: int, frame: object) -> None:
            again, self.asked = self.asked is not None, signal.Signals(number)
            if self._pass_on is not None:
                self._pass_on(signal.SIGKILL if again else self.asked)

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def passed_on(self, send: Callable[[signal.Signals], None]) -> Iterator[None]:
        """Hands signals to `send` while the block runs, one that came before it too."""
        self._pass_on = send
        if self.asked is not None:
            send(self.asked)
        try:
            yield
        finally:
            self._pass_on = None

    @property
    def exit_code(self) -> int | None:
        """128 plus the number of the signal; None if there was none."""
        return None if self.asked is None else 128 + self.asked


def run_child(command: Sequence[str], log: Path, stop: Stop) -> int:
    """Runs a command to its end; returns its exit code, or minus the signal that killed it."""
    # It runs under the launcher's guard (`jdist/launcher/guard.py`), so that it, and all that it
    # starts, ends with this process, however that ends. `stop` forwards it the signals that come
    # here.
    with writing(log), log.open("wb") as output:
        guard = GuardPipe(command, os.environ, output=output)
        with contextlib.closing(guard), stop.passed_on(guard.send):
            while not guard.is_gone():  # waits as long as the run lasts; signals get through meanwhile
                pass
    return guard.end()[0]
