"""Decides when the launcher starts, stops and restarts processes: a pure function of its state and one event.

    RUNNING ── a worker fails ──> FAILING ── all gone ──> WAITING ── backoff over ──> RUNNING (attempt + 1)
       │                             └── no restart left, or none can help ──> DONE
       ├── all workers well, the evaluator goes on ──> FINISHING ──> DONE
       ├── the user asks ──> STOPPING ──> DONE
       └── fewer than the largest number, for `regrow_s` ──> REGROWING ── all gone ──> RUNNING (attempt + 1, largest)

A job that goes on without lost processes stays RUNNING as long as a member of its newest world does: a lost process is killed
if it is still there, and started again, each time later. Before the first world, and after the last one, the above applies.

Processes that are to end get a `plan`: signals with their times, and when to give up. Nothing here reads a clock: each
event has its time.
"""

from __future__ import annotations

import signal
from dataclasses import replace

from jdist.cluster.exit_status import FAILED, FINISHED, PEER_LOST
from jdist.launcher.events import (
    Again,
    Asked,
    Commands,
    Event,
    Fenced,
    JobEnded,
    Phase,
    Plan,
    Send,
    Settings,
    Start,
    State,
    World,
)
from jdist.launcher.exit_cause import (
    CHIEF,
    EVALUATOR,
    QUICK_S,
    WORKER,
    Attempt,
    End,
    Kind,
    Task,
    count_lost,
    describe,
    exit_code,
    find_guilty,
    kind,
    restart_may_help,
)
from jdist.launcher.restarts import backoff_s

# A second signal this soon is the first: a terminal and a scheduler may both send it.
SAME_SIGNAL_S = 1.0
NOTICE_S = 5.0  # from the first to the last process that leaves because a peer is lost
LINGER_S = 1.0  # from the news that a process is lost to its end, unless it stands still


def begin(settings: Settings, now: float) -> tuple[State, Commands]:
    """Makes the first state, and the command to start the first attempt."""
    return _start(State(settings=settings, size=settings.largest, regrow_s=settings.regrow_s), now)


def step(state: State, event: Event) -> tuple[State, Commands]:
    """Computes the next state, and the commands in their order; the times of events never go back."""
    if state.phase is Phase.DONE:
        return state, ()
    if isinstance(event, End):
        return _ended(state, event)
    if isinstance(event, World):
        return _enter(state, event)
    if isinstance(event, Fenced):
        task = Task(WORKER, event.number)
        fenced = {task: event.at + LINGER_S} if task in state.running else {}
        return replace(state, timers={**state.timers, **fenced}), ()
    if isinstance(event, JobEnded):
        if state.phase is not Phase.RUNNING:
            return state, ()
        state, commands = _finish(state, event.at, event.why and f"the job has ended: {event.why}")
        if state.running:
            return state, commands
        state, more = _over(state, event.at)
        return state, commands + more
    return _asked(state, event) if isinstance(event, Asked) else _tick(state, event.at)


def _start(state: State, now: float) -> tuple[State, Commands]:
    settings = state.settings
    count = state.size + settings.spares
    tasks = tuple(Task(CHIEF if settings.chief else WORKER, index) for index in range(count))
    if settings.evaluator:
        tasks += (Task(EVALUATOR, 0),)
    state = replace(
        state,
        phase=Phase.RUNNING,
        attempt=state.attempt + 1,
        started_at=now,
        running=frozenset(tasks),
        ends=(),
        sent={},
        plan=(),
        world=None,
        before=0,
        lost=0,
        timers={},
        wake_at=now + state.regrow_s if state.size < settings.largest else None,
    )
    return state, (Start(state.attempt, tasks),)


def _ended(state: State, end: End) -> tuple[State, Commands]:
    if end.task not in state.running:
        return state, ()
    end = replace(end, sent=state.sent.get(end.task))
    state = replace(
        state,
        running=state.running - {end.task},
        ends=(*state.ends, end),
        timers={task: at for task, at in state.timers.items() if task != end.task},
    )
    commands: Commands = ()
    if kind(end) != Kind.WELL:
        if end.task.type == EVALUATOR:
            if state.phase in (Phase.RUNNING, Phase.FINISHING):
                commands = (f"{end.task} {describe(end)}; the job goes on without it",)
        elif state.phase is Phase.RUNNING and (state.settings.join or (state.world and _goes_on(state))):
            state, commands = _replace_lost(state, end)
        elif end in _counted(state):
            state, commands = _fail(state, end)
    if not state.running and not (state.phase is Phase.RUNNING and _goes_on(state)):
        state, more = _over(state, end.at)
        return state, commands + more
    if state.phase is Phase.RUNNING and not _goes_on(state):
        wait_s, is_alone = state.settings.stop_timeout_s, all(task.type == EVALUATOR for task in state.running)
        text = f"the job has ended; the evaluator has {wait_s:g} s to come to its last checkpoint"
        state, more = _finish(state, end.at, text if is_alone else "")
        commands += more
    return state, commands


def _goes_on(state: State) -> bool:
    """Returns whether processes of the job go on, here or from another launch."""
    settings, here = state.settings, {task.index for task in state.running if task.type != EVALUATOR}
    if settings.join:
        return bool(here or state.timers)
    if state.world is None:
        return bool(here)
    alive = state.world.numbers - {end.task.index for end in state.ends[state.before :] if end.task.type == WORKER}
    return any(number in here or number >= settings.largest + settings.spares for number in alive)


def _counted(state: State) -> tuple[End, ...]:
    """Returns the ends that say how the job ended: of all, or of the members of the newest world."""
    ends = tuple(end for end in state.ends[state.before :] if end.task.type != EVALUATOR)
    if state.settings.join:
        last = {end.task: end for end in ends}.values()
        is_well = any(end.code == FINISHED for end in last)  # then the others waited at the end of the job
        return tuple(end for end in last if not (is_well and end.code == PEER_LOST))
    if state.world is None:
        return ends
    members = [end for end in reversed(ends) if end.task.index in state.world.numbers]
    return tuple({end.task: end for end in members}.values())  # the first of each


def _enter(state: State, world: World) -> tuple[State, Commands]:
    is_first = state.world is None
    state = replace(state, world=world, before=len(state.ends))
    if is_first:
        return state, ()
    return state, (f"world {world.generation}: processes {', '.join(map(str, sorted(world.numbers)))} go on",)


def _replace_lost(state: State, end: End) -> tuple[State, Commands]:
    """Goes on without a process, and plans to start it again."""
    settings, text = state.settings, f"{end.task} {describe(end)}; the others go on"
    state = replace(state, lost=state.lost + 1)
    if kind(end) == Kind.LEFT:
        return state, (text,)
    if not restart_may_help(end):
        return state, (f"{text}; starting it again would not help",)
    if state.restarts + len(state.timers.keys() - state.running) >= settings.max_restarts:
        return state, (f"{text}; it is not started again: max_restarts is {settings.max_restarts}",)
    quick = sum(each.task == end.task and end.at - each.at < QUICK_S for each in state.ends)
    wait_s = backoff_s(quick, seed=settings.seed, attempt=len(state.ends))
    state = replace(state, timers={**state.timers, end.task: end.at + wait_s})
    return state, (f"{text}; started again in {wait_s:.1f} s",)


def _finish(state: State, now: float, text: str) -> tuple[State, Commands]:
    """Plans the end of what is left after the job: the evaluator, and processes that stood ready."""
    settings, has_evaluator = state.settings, Task(EVALUATOR, 0) in state.running
    first = now + (settings.stop_timeout_s if has_evaluator else settings.grace_s)
    plan = _plan(first, settings.grace_s, signal.SIGTERM, signal.SIGKILL)
    return replace(state, phase=Phase.FINISHING, plan=plan, wake_at=None, timers={}), (text,) if text else ()


def _fail(state: State, end: End) -> tuple[State, Commands]:
    """Plans the end of the others after a worker has failed: later where they may be saving."""
    grace_s, first = state.settings.grace_s, state.phase in (Phase.RUNNING, Phase.REGROWING, Phase.STOPPING)
    if kind(end) == Kind.LEFT:  # all have agreed to save and leave
        plan = _plan(end.at + state.settings.stop_timeout_s, grace_s, signal.SIGKILL)
        text = "the others may save and leave"
    elif state.phase is Phase.RUNNING and end.code == PEER_LOST:
        # All that run notice it within a moment. The rest stand still, and SIGTERM does not end them.
        leave_s = min(grace_s, NOTICE_S)
        plan = _plan(end.at + leave_s, grace_s, signal.SIGKILL)
        text = f"the others have {leave_s:g} s to leave as well"
    elif state.phase is Phase.RUNNING:
        plan = _plan(end.at + grace_s, grace_s, signal.SIGTERM, signal.SIGKILL)
        text = f"the others have {grace_s:g} s to end by themselves"
    else:  # they were asked already, or are ending
        plan = _plan(end.at + grace_s, grace_s, signal.SIGKILL)
        text = f"the others have {grace_s:g} s left"
    if state.plan and state.plan[0][0] <= plan[0][0]:
        plan = state.plan
    state = replace(state, phase=Phase.FAILING, plan=plan, wake_at=None)
    if not first or not state.running:
        return state, ()
    commands: Commands = (f"{end.task} {describe(end)}; {text}",)
    # The evaluator has no peers, so it does not notice a loss.
    idle = frozenset(task for task in state.running if task.type == EVALUATOR and task not in state.sent)
    state, sent = _send(state, idle, signal.SIGTERM)
    return state, commands + sent


def _asked(state: State, event: Asked) -> tuple[State, Commands]:
    settings, name = state.settings, event.signal.name
    is_same = event.signal == state.stop and event.at - state.asked_at < SAME_SIGNAL_S
    state = replace(state, asked_at=event.at)
    if is_same:
        return state, ()
    if state.phase is Phase.WAITING:
        state = replace(state, phase=Phase.DONE, stop=event.signal, wake_at=None, exit_code=128 + event.signal)
        return state, (f"{name}: no further attempt",)
    if state.stop is not None:
        plan = _plan(event.at + settings.grace_s, settings.grace_s)
        state, sent = _send(replace(state, forced=True, plan=plan), state.running, signal.SIGKILL)
        return state, (f"{name} again: killing all processes", *sent)
    if state.phase in (Phase.FAILING, Phase.REGROWING):
        phase = Phase.FAILING if state.phase is Phase.FAILING else Phase.STOPPING
        unasked = state.running - state.sent.keys()
        state, sent = _send(replace(state, phase=phase, stop=event.signal), unasked, event.signal)
        return state, (f"{name}: no further attempt", *sent)
    plan = _plan(event.at + settings.stop_timeout_s, settings.grace_s, signal.SIGKILL)
    state = replace(state, phase=Phase.STOPPING, stop=event.signal, plan=plan, wake_at=None, before=len(state.ends))
    # The evaluator may have been told to finish: a second signal would cut a save short.
    state, sent = _send(state, state.running - state.sent.keys(), event.signal)
    name += " passed on" if sent else ""
    text = f"{name}; all have {settings.stop_timeout_s:g} s to save and leave, a second signal kills them"
    if not state.running:  # lost ones were to be started again
        return _over(state, event.at)
    return state, (text, *sent)


def _tick(state: State, now: float) -> tuple[State, Commands]:
    if state.wake_at is not None and now >= state.wake_at:
        if state.phase is Phase.WAITING:
            return _start(state, now)
        largest = state.settings.largest
        plan = _plan(now + state.settings.stop_timeout_s, state.settings.grace_s, signal.SIGKILL)
        state, sent = _send(
            replace(state, phase=Phase.REGROWING, plan=plan, wake_at=None), state.running, signal.SIGTERM
        )
        return state, (f"asking all to save and leave, to go on with {largest} processes", *sent)
    commands: Commands = ()
    for task in [task for task, at in state.timers.items() if now >= at]:
        state, more = _on_timer(state, task)
        commands += more
    while state.plan and now >= state.plan[0][0]:
        number = state.plan[0][1]
        state = replace(state, plan=state.plan[1:])
        if number is None:
            state, more = _give_up(state, now)
        else:
            # A second SIGTERM would cut a save short.
            tasks = state.running if number == signal.SIGKILL else state.running - state.sent.keys()
            state, more = _send(state, tasks, number)
            if tasks:
                more = (f"still there: {_names(tasks)}; sending {number.name}", *more)
        commands += more
    return state, commands


def _on_timer(state: State, task: Task) -> tuple[State, Commands]:
    """Kills a lost process that is still there, or starts one again that is not."""
    state = replace(state, timers={other: at for other, at in state.timers.items() if other != task})
    if task in state.running:
        state, sent = _send(state, frozenset({task}), signal.SIGKILL)
        return state, (f"{task} stands still, and the others go on without it; sending SIGKILL", *sent)
    if state.phase is not Phase.RUNNING:
        return state, ()
    sent = {other: number for other, number in state.sent.items() if other != task}
    state = replace(state, running=state.running | {task}, sent=sent, restarts=state.restarts + 1)
    return state, (Again(task),)


def _give_up(state: State, now: float) -> tuple[State, Commands]:
    """Gives up after SIGKILL: the system holds the processes, and nothing can be started next to them."""
    held = state.running
    ends = tuple(End(task=task, code=-signal.SIGKILL, at=now, sent=signal.SIGKILL) for task in sorted(held))
    state = replace(state, ends=state.ends + ends, running=frozenset(), forced=False)
    state, record = _record(state, now, find_guilty(state.ends), "failed")
    text = f"cannot be ended, not even by SIGKILL: {_names(held)}; a device or a file system holds it"
    return replace(state, phase=Phase.DONE, exit_code=FAILED), (text, record)


def _over(state: State, now: float) -> tuple[State, Commands]:
    """Decides what follows once all processes of an attempt are gone."""
    counted = _counted(state)
    cause = find_guilty(counted)
    finished = all(end.code == FINISHED for end in counted)
    if state.stop is not None and (state.forced or (cause and kind(cause) == Kind.LEFT)):
        cause = None
    if cause is None and state.stop is None and state.phase is Phase.REGROWING and not finished:
        state, record = _record(state, now, None, "grown")
        state, start = _start(replace(state, size=state.settings.largest, grown=True), now)
        return state, (record, *start)
    if cause is None:
        if finished and not state.forced:
            # The evaluator's, which no restart of the workers would mend.
            cause = find_guilty(end for end in state.ends if end.task.type == EVALUATOR)
        whole = finished and all(end.code == FINISHED for end in state.ends if end.task.type == EVALUATOR)
        code = 128 + state.stop if state.stop and (state.forced or not whole) else FINISHED
        code = exit_code(cause) if cause else code
        state, record = _record(state, now, cause, "failed" if cause else "stopped" if code else "finished")
        return replace(state, phase=Phase.DONE, exit_code=code), (record,)
    state, record = _record(state, now, cause, "failed")
    trial = state.grown and record.duration_s < state.regrow_s  # growing failed: it uses up no restart
    if (
        state.stop is not None
        or state.settings.join
        or not restart_may_help(cause)
        or (state.restarts == state.settings.max_restarts and not trial)
    ):
        return replace(state, phase=Phase.DONE, exit_code=exit_code(cause)), (record,)
    return _restart(state, now, record, trial=trial)


def _restart(state: State, now: float, record: Attempt, *, trial: bool) -> tuple[State, Commands]:
    settings = state.settings
    fewer = max(count_lost(end for end in state.ends if end.task.type != EVALUATOR), trial)
    fewer = 0 if settings.goes_on else fewer
    quick = state.quick + 1 if record.duration_s < QUICK_S else 1
    wait_s = backoff_s(quick, seed=settings.seed, attempt=state.attempt)
    state = replace(
        state,
        phase=Phase.WAITING,
        size=max(settings.smallest, state.size - fewer),
        grown=False,
        plan=(),
        wake_at=now + wait_s,
        regrow_s=state.regrow_s * 2 if trial else state.regrow_s,
        restarts=state.restarts + (not trial),
        quick=quick,
    )
    which = "back to fewer" if trial else f"restart {state.restarts} of {settings.max_restarts}"
    return state, (record, f"{which} in {wait_s:.1f} s, with {state.size} processes")


def _record(state: State, now: float, cause: End | None, outcome: str) -> tuple[State, Attempt]:
    attempt = Attempt(
        number=state.attempt,
        size=state.size,
        duration_s=now - state.started_at,
        ends=tuple(sorted(state.ends, key=lambda end: end.at)),
        guilty=cause,
        outcome=outcome,
        lost=state.lost,
        worlds=0 if state.world is None else state.world.generation + 1,
    )
    return replace(state, timers={}, history=(*state.history, attempt), plan=(), wake_at=None), attempt


def _send(state: State, tasks: frozenset[Task], number: signal.Signals) -> tuple[State, Commands]:
    if not tasks:
        return state, ()
    return replace(state, sent={**state.sent, **dict.fromkeys(tasks, number)}), (Send(tasks, number),)


def _plan(at: float, grace_s: float, *signals: signal.Signals) -> Plan:
    """Plans the signals from `at` on, `grace_s` apart, and after the last one to give up."""
    return tuple((at + n * grace_s, number) for n, number in enumerate((*signals, None)))


def _names(tasks: frozenset[Task]) -> str:
    return ", ".join(map(str, sorted(tasks)))
