"""A launch without processes: children that behave as told, and a clock that jumps to the next event."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jdist.launcher.events import Asked, Phase, Send, Settings, Start, State, Tick
from jdist.launcher.exit_cause import Attempt, End, Task
from jdist.launcher.supervisor import begin, step


@dataclass(frozen=True)
class Child:
    """How one process behaves.

    Attributes:
        after_s: when it ends by itself; None for never.
        code: how it ends then.
        leaves: its exit code when it is asked by SIGINT or SIGTERM; None if it does not listen.
        leaves_after_s: how long that takes it.
        immortal: not even SIGKILL ends it.
    """

    after_s: float | None = None
    code: int = 0
    leaves: int | None = 143
    leaves_after_s: float = 1.0
    immortal: bool = False


@dataclass
class Simulated:
    """What a simulated launch came to.

    Attributes:
        state: the last one.
        sizes: workers of each attempt.
        starts: when each attempt began.
        said: the texts.
        sent: (time, task, signal).
        sent_in: for each of these, the attempt; one may end and the next begin at the same time.
        alive: processes that had not ended.
        now: the time at the end.
    """

    state: State
    sizes: list[int]
    starts: list[float]
    said: list[str]
    sent: list[tuple[float, Task, signal.Signals]]
    sent_in: list[int]
    alive: set[Task]
    now: float

    @property
    def exit_code(self) -> int | None:
        return self.state.exit_code

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        return self.state.history


def simulate(
    settings: Settings,
    child: Callable[[int, Task], Child],
    asks: Sequence[tuple[float, signal.Signals]] = (),
    *,
    until: float = 1e6,
) -> Simulated:
    """Run a launch until it is done, nothing more can happen, or the time `until` has come."""
    alive: dict[Task, Child] = {}
    ends: dict[Task, tuple[float, int]] = {}
    asking = sorted(asks, key=lambda ask: ask[0])
    done = Simulated(None, [], [], [], [], [], set(), 0.0)  # pyright: ignore[reportArgumentType]  # set below

    def obey(commands):
        for command in commands:
            if isinstance(command, Start):
                assert not alive, "an attempt was started while processes of the one before were alive"
                done.sizes.append(sum(task.type == "worker" for task in command.tasks))
                done.starts.append(done.now)
                for task in command.tasks:
                    alive[task] = child(command.attempt, task)
                    if (after_s := alive[task].after_s) is not None:
                        ends[task] = (done.now + after_s, alive[task].code)
            elif isinstance(command, Send):
                for task in command.tasks:
                    done.sent.append((done.now, task, command.signal))
                    done.sent_in.append(len(done.starts))
                    _send(command.signal, task)
            elif isinstance(command, str):
                done.said.append(command)

    def _send(number, task):
        behaviour = alive.get(task)
        if behaviour is None or behaviour.immortal:
            return
        if number == signal.SIGKILL:
            ends[task] = (done.now, -signal.SIGKILL)
        elif behaviour.leaves is not None:
            leaves_at = done.now + behaviour.leaves_after_s
            if task not in ends or ends[task][0] > leaves_at:
                ends[task] = (leaves_at, behaviour.leaves)

    state, commands = begin(settings, 0.0)
    obey(commands)
    while state.phase is not Phase.DONE:
        moments = [at for at, _ in ends.values()] + [at for at, _ in asking[:1]]
        if state.due is not None:
            moments.append(state.due)
        if not moments or min(moments) > until:
            break
        done.now = max(done.now, min(moments))
        ended = min((task for task in ends if ends[task][0] <= done.now), key=lambda task: ends[task], default=None)
        if ended is not None:
            at, code = ends.pop(ended)
            del alive[ended]
            event = End(at=max(at, 0.0), task=ended, code=code)
        elif asking and asking[0][0] <= done.now:
            event = Asked(at=done.now, signal=asking.pop(0)[1])
        else:
            event = Tick(at=done.now)
        state, commands = step(state, event)
        obey(commands)
    done.state, done.alive = state, set(alive)
    return done
