"""Where a launch's processes run: on this machine, or wherever another engine puts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from jdist.launcher.console import Console
from jdist.launcher.environment import free_ports
from jdist.launcher.exit_cause import Task
from jdist.launcher.output import Controlled, LogFile
from jdist.launcher.process import Process


class Host(Protocol):
    """Places the processes of each attempt, and starts them."""

    def place(self, tasks: Sequence[Task], is_asked: Callable[[], bool]) -> list[str]:
        """Finds a place for each process of an attempt; the ports after the addresses' are free."""
        # `is_asked`: the user has asked to stop meanwhile.
        ...

    def spawn(
        self,
        task: Task,
        line: Sequence[str],
        environ: Mapping[str, str],
        *,
        log: LogFile,
        prefixes: tuple[bytes, bytes],
        console: Console,
    ) -> Controlled:
        """Starts a process in its place; arguments as of `Process`."""
        ...


class LocalHost:
    """This machine."""

    def place(self, tasks: Sequence[Task], is_asked: Callable[[], bool]) -> list[str]:
        return [f"127.0.0.1:{port}" for port in free_ports(len(tasks))]

    def spawn(
        self,
        task: Task,
        line: Sequence[str],
        environ: Mapping[str, str],
        *,
        log: LogFile,
        prefixes: tuple[bytes, bytes],
        console: Console,
    ) -> Controlled:
        return Process(task, line, environ, log=log, prefixes=prefixes, console=console)
