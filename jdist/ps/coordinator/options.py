"""Options of a session: where it runs, and how its state is laid out, travels and is updated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jdist.core.strategy import Strategy
from jdist.ps.program.partition import Partitioner, Placement
from jdist.ps.program.wire_dtype import Wire
from jdist.ps.protocol.shard import Rules
from jdist.ps.protocol.times import Times
from jdist.ps.transport.interface import Channel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Servers:
    """The processes that a session uses.

    Attributes:
        workers: addresses of the workers.
        ps: addresses of the parameter servers.
        connect: from an address to a channel.
        close: ends what was started for the job.
        leave: has `close` leave others alone: they are another job's.
        processes: gives the process ids of what was started: the parameter servers, then the workers.
        running_workers: gives those of the workers that have not ended.
    """

    workers: tuple[str, ...]
    ps: tuple[str, ...]
    connect: Callable[[str], Channel]
    close: Callable[[], None]
    leave: Callable[[], None] = lambda: None
    processes: Callable[[], tuple[int, ...]] = tuple
    running_workers: Callable[[], tuple[int, ...]] = tuple

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of what was started, as they are now: one that has ended is started again."""
        return self.processes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PsOptions:
    """How a state is laid out over the servers, travels and is updated; see `jdist.parameter_server`.

    Attributes:
        on_worker: from a worker's number of devices to the strategy that its part of a step is traced under.
    """

    on_worker: Callable[[int], Strategy]
    partitioner: Partitioner
    placement: Placement
    rules: Rules
    times: Times
    wire: Wire = "float32"
    is_sync: bool = False
    gradients_per_update: int = 1
    backup_workers: int = 0
    replicas: int = 1
