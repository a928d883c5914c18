"""The launcher's state, the events that change it, and the commands that follow: plain values."""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from jdist.launcher.exit_cause import Attempt, End, Task


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a launch; see `launch` for those of its names.

    Attributes:
        smallest: fewest workers to go on with.
        largest: workers to start with.
        chief: whether the one process is the chief of a parameter server.
        seed: of the backoff's jitter.
    """

    smallest: int
    largest: int
    evaluator: bool = False
    chief: bool = False
    max_restarts: int = 0
    grace_s: float = 10.0
    stop_timeout_s: float = 300.0
    regrow_s: float = 300.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The launcher was sent SIGINT or SIGTERM."""

    at: float
    signal: signal.Signals


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Time went by."""

    at: float


# An `End` as an event: a process and all that it had started are gone.
Event = End | Asked | Tick


@dataclass(frozen=True)
class Start:
    """Start these processes as one cluster."""

    attempt: int
    tasks: tuple[Task, ...]


@dataclass(frozen=True)
class Send:
    """Send a signal to these processes."""

    tasks: frozenset[Task]
    signal: signal.Signals


@dataclass(frozen=True)
class Say:
    """Tell the user."""

    text: str


# An `Attempt` as a command: report it.
Command = Start | Send | Say | Attempt
Commands = tuple[Command, ...]


class Phase(enum.Enum):
    """Where a launch stands."""

    RUNNING = enum.auto()
    FINISHING = enum.auto()
    FAILING = enum.auto()
    STOPPING = enum.auto()
    REGROWING = enum.auto()
    WAITING = enum.auto()
    DONE = enum.auto()


Plan = tuple[tuple[float, signal.Signals | None], ...]


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of a launch.

    Attributes:
        settings: of the launch.
        phase: where it stands.
        attempt: counted from 0.
        size: workers of this attempt, or of the next one while waiting.
        grown: this attempt is a trial of more workers than the one before.
        started_at: when the attempt began.
        running: processes that are not gone yet.
        ends: of this attempt.
        sent: the last signal that each process was sent.
        plan: signals still to be sent to those that are running: (time, signal), None to give up.
        wake_at: when to start the next attempt, or to try to grow.
        regrow_s: how long the next smaller attempt runs before it tries to grow.
        restarts: how many were used.
        quick: attempts in a row that failed soon after their start.
        stop: the signal by which the user asked to stop.
        asked_at: when that came last.
        forced: the user asked twice.
        history: attempts that are over.
        exit_code: of the launcher, once it is done.
    """

    settings: Settings
    phase: Phase = Phase.WAITING
    attempt: int = -1
    size: int
    grown: bool = False
    started_at: float = 0.0
    running: frozenset[Task] = frozenset()
    ends: tuple[End, ...] = ()
    sent: Mapping[Task, signal.Signals] = field(default_factory=dict)
    plan: Plan = ()
    wake_at: float | None = None
    regrow_s: float
    restarts: int = 0
    quick: int = 0
    stop: signal.Signals | None = None
    asked_at: float = 0.0
    forced: bool = False
    history: tuple[Attempt, ...] = ()
    exit_code: int | None = None

    @property
    def due(self) -> float | None:
        """When the next `Tick` is needed, None if not before another event."""
        times = [self.plan[0][0]] if self.plan else []
        if self.wake_at is not None:
            times.append(self.wake_at)
        return min(times, default=None)
