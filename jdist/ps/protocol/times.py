"""The coordinator's time limits."""

from __future__ import annotations

import dataclasses

from jdist.errors import StrategyError
from jdist.support import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Times that the coordinator waits for others, in seconds.

    Attributes:
        ping_s: between two heartbeats of a worker or a server.
        lost_after_s: without an answer, after which a process counts as lost.
        install_s: for a worker to install a function.
        closure_s: for a batch of closures.
        reconnect_s: between two attempts to reach a lost worker.
        max_losses: how often a worker may be lost within `losses_within_s` before it is excluded.
        losses_within_s: see `max_losses`.
        no_worker_timeout_s: without any worker, after which the job fails.
        standstill_s: without a closure that finishes, after which a warning names whom all wait for.
        ps_timeout_s: for a parameter server that does not answer, or for another in its place.
    """

    ping_s: float = 1.0
    lost_after_s: float = 10.0
    install_s: float = 60.0
    closure_s: float = 3600.0
    reconnect_s: float = 0.5
    max_losses: int = 8
    losses_within_s: float = 600.0
    no_worker_timeout_s: float = 300.0
    standstill_s: float = 60.0
    ps_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            checks.real_number(name, value, StrategyError, above=0, call="jdist.ps.Times")
