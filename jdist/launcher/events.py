"""The launcher's state, the events that change it, and the commands that follow: plain values."""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from jdist.errors import LaunchError
from jdist.launcher.exit_cause import Attempt, End, Task
from jdist.support import checks


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a launch; see `launch` for those of its names."""

    smallest: int  # fewest workers to go on with
    largest: int  # workers to start with
    evaluator: bool = False  # whether there is one
    chief: bool = False  # whether the one process is the chief of a parameter server
    max_restarts: int = 0
    grace_s: float = 10.0
    stop_timeout_s: float = 300.0
    regrow_s: float = 300.0
    on_loss: str = "stop"  # or "continue": the others go on without a lost process, and another replaces it
    spares: int = 0  # processes that stand ready, more than `largest`
    join: str | None = None  # the address of another launch's job, which these processes join
    seed: int = 0  # of the backoff's jitter

    def __post_init__(self) -> None:
        for name in ("grace_s", "stop_timeout_s", "regrow_s"):
            object.__setattr__(self, name, checks.seconds(name, getattr(self, name), LaunchError))
        restarts = checks.whole_number("max_restarts", self.max_restarts, LaunchError, least=0)
        object.__setattr__(self, "max_restarts", restarts)
        object.__setattr__(self, "spares", checks.whole_number("spares", self.spares, LaunchError, least=0))

    @property
    def goes_on(self) -> bool:
        """Returns whether the job goes on without lost processes."""
        return self.on_loss == "continue"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The launcher was sent SIGINT or SIGTERM."""

    at: float
    signal: signal.Signals


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Time has passed."""

    at: float


@dataclass(frozen=True, kw_only=True)
class World:
    """The job goes on with the processes that have these numbers."""

    at: float
    generation: int
    numbers: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Fenced:
    """The job has lost a process, which may still be there."""

    at: float
    number: int


@dataclass(frozen=True, kw_only=True)
class JobEnded:
    """No world follows: the job is over, or its host is gone."""

    at: float
    why: str


# An `End` as an event: a process and all that it had started are gone.
Event = End | Asked | Tick | World | Fenced | JobEnded


@dataclass(frozen=True)
class Start:
    """Start these processes as one cluster."""

    attempt: int
    tasks: tuple[Task, ...]


@dataclass(frozen=True)
class Again:
    """Start one process again, in its place."""

    task: Task


@dataclass(frozen=True)
class Send:
    """Send a signal to these processes."""

    tasks: frozenset[Task]
    signal: signal.Signals


# An `Attempt` as a command: report it. A text: tell it to the user.
Command = Start | Again | Send | Attempt | str
Commands = tuple[Command, ...]


class Phase(enum.Enum):
    """The phases of a launch; `supervisor` has the arrows between them."""

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
    """The state of a launch."""

    settings: Settings
    phase: Phase = Phase.WAITING
    attempt: int = -1  # counted from 0
    size: int  # workers of this attempt, or of the next one while waiting
    grown: bool = False  # whether this attempt tries more workers than the one before
    started_at: float = 0.0  # when this attempt was started
    running: frozenset[Task] = frozenset()  # processes that are not gone yet
    ends: tuple[End, ...] = ()  # of this attempt
    sent: Mapping[Task, signal.Signals] = field(default_factory=dict)  # the last signal that each process was sent
    plan: Plan = ()  # signals to send to the running processes: (time, signal), None to give up
    wake_at: float | None = None  # when to start the next attempt, or to try to grow
    regrow_s: float  # how long a smaller attempt runs before it tries to grow
    restarts: int = 0  # how many were used up, by attempts and by single processes
    quick: int = 0  # attempts in a row that failed soon after their start
    stop: signal.Signals | None = None  # the signal by which the user asked to stop
    asked_at: float = 0.0  # when that last came
    forced: bool = False  # whether the user asked twice
    world: World | None = None  # the newest of this attempt
    before: int = 0  # how many of `ends` came before that world, or before the user asked to stop
    lost: int = 0  # processes that this attempt went on without
    timers: Mapping[Task, float] = field(default_factory=dict)  # when to kill a lost process, or to start it again
    history: tuple[Attempt, ...] = ()  # attempts that are over
    exit_code: int | None = None  # the launcher's, once it is done

    @property
    def due(self) -> float | None:
        """Returns the time when the next `Tick` is needed; None if not before another event."""
        times = [*self.timers.values(), *(at for at, _ in self.plan[:1])]
        if self.wake_at is not None:
            times.append(self.wake_at)
        return min(times, default=None)
