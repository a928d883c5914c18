"""The scheduler of closures as a pure state machine: (dispatch, event) -> (dispatch, commands).

The coordinator's half of docs/parameter_server_protocol.md: closures are handed out in their order, those of a
lost worker are committed or handed out again, and after a rollback all that the snapshot does not contain. The
shell, `jdist/ps/coordinator/closure_queue.py`, holds functions, arguments and results; what is connected to it
carries out commands, and repeats a `Tell` until it is answered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Literal

from jdist.ps.protocol import scheduler_events as events
from jdist.ps.protocol import sync_rounds
from jdist.ps.protocol.messages import Commit, Drop, Fence, Held, Message, Restore, changed
from jdist.ps.protocol.sync_rounds import Rounds


def handle(dispatch: Dispatch, *happened: events.Event) -> tuple[Dispatch, list[events.Command]]:
    """Returns the state after events, and what the shell has to do, in this order."""
    commands: list[events.Command] = []
    for event in happened:
        dispatch, more = _handle(dispatch, event)
        commands += more
    dispatch, assigned = _assign(dispatch)
    if dispatch.rounds is not None and _is_exhausted(dispatch):
        dispatch, more = _advance_round(dispatch, None)
        commands += more
    return dispatch, [*commands, *assigned]


def _handle(dispatch: Dispatch, event: events.Event) -> tuple[Dispatch, list[events.Command]]:
    match event:
        case events.Scheduled():
            return changed(dispatch, scheduled=dispatch.scheduled + event.count), []
        case events.Parted() if dispatch.rounds is not None:
            return dispatch, []  # updates are made one at a time, in the closures' order
        case events.Parted():
            parts = {p for p in dispatch.parts if p > event.kept} | {dispatch.scheduled}
            return changed(dispatch, parts=tuple(sorted(parts))), []
        case events.Registered():
            return _register(dispatch, event)
        case events.Reported():
            return _report(dispatch, event)
        case events.Lost():
            return _lose(dispatch, event)
        case events.Answered():
            return _take_answer(dispatch, event)
        case events.Rollback():
            return _roll_back(dispatch, event)
        case events.Decided():
            return _advance_round(dispatch, event)
        case events.Cancelled():
            return _cancel(dispatch, event)


def _assign(dispatch: Dispatch) -> tuple[Dispatch, list[events.Command]]:
    """Hands out closures, to the worker that has fewest first."""
    if dispatch.restoring:
        return dispatch, []
    workers, returned, first = dispatch.workers, list(dispatch.returned), dispatch.next
    counts = {w: len(each.closures) for w, each in workers.items() if each.state == "ready"}
    if not counts or min(counts.values()) >= dispatch.depth:
        return dispatch, []
    part = next((p for p in dispatch.parts if p > dispatch.settled), dispatch.scheduled)
    limit = min(part, dispatch.settled + dispatch.window, _end_of_round(dispatch))
    assigned: dict[int, list[int]] = {}
    while ready := [w for w, count in counts.items() if count < dispatch.depth]:
        declined = frozenset.intersection(*(workers[w].declined for w in ready))
        new = _first_new(dispatch, first)
        closure = next((c for c in returned if c not in declined), new)
        if closure >= limit:
            break
        if closure == new:
            first = new + 1
        else:
            returned.remove(closure)
        worker = min((w for w in ready if closure not in workers[w].declined), key=lambda w: (counts[w], w))
        assigned.setdefault(worker, []).append(closure)
        counts[worker] += 1
    having = {w: changed(workers[w], closures=(*workers[w].closures, *each)) for w, each in assigned.items()}
    dispatch = changed(dispatch, returned=tuple(returned), next=first, workers={**workers, **having})
    return dispatch, [
        events.Assign(worker=w, epoch=workers[w].epoch, generation=dispatch.generation, closures=tuple(each))
        for w, each in assigned.items()
    ]


def _first_new(dispatch: Dispatch, first: int) -> int:
    """Returns the first closure to compute that no worker has had, from `first` on."""
    first = max(first, dispatch.settled)
    while first in dispatch.done:  # it was cancelled
        first += 1
    return first


def _cancel(dispatch: Dispatch, event: events.Cancelled) -> tuple[Dispatch, list[events.Command]]:
    wanted = event.only
    if wanted is None:
        wanted = {*dispatch.returned, *range(dispatch.next, dispatch.scheduled)}
    dropped = {c for c in wanted if c not in event.spare and dispatch.is_waiting(c)}
    dispatch = changed(dispatch, returned=tuple(c for c in dispatch.returned if c not in dropped))
    dispatch = _finish(dispatch, dropped)
    dispatch = changed(dispatch, next=_first_new(dispatch, dispatch.next))
    return dispatch, [events.Finish(closure=c, outcome="void") for c in sorted(dropped)]


def _register(dispatch: Dispatch, event: events.Registered) -> tuple[Dispatch, list[events.Command]]:
    known = dispatch.workers.get(event.worker, Worker())
    if known.state == "absent":
        dispatch = _with(dispatch, event.worker, epoch=known.epoch + 1, state="ready", closures=())
        return _clear_declined(dispatch), []
    commands: list[events.Command] = []
    if known.state == "ready":  # a new process in place of one that was not missed yet
        dispatch, commands = _lose(dispatch, events.Lost(worker=event.worker, epoch=known.epoch))
    if dispatch.workers[event.worker].state == "absent":
        return _register(dispatch, event)[0], commands
    return _with(dispatch, event.worker, waits=True), commands


def _report(dispatch: Dispatch, event: events.Reported) -> tuple[Dispatch, list[events.Command]]:
    known = dispatch.workers.get(event.worker) or Worker()
    mine = (event.epoch, event.generation) == (known.epoch, dispatch.generation) and known.state == "ready"
    if not mine or event.closure not in known.closures:
        return dispatch, []
    dispatch = _with(dispatch, event.worker, closures=tuple(c for c in known.closures if c != event.closure))
    if event.outcome == "declined":
        declined = {c for c in known.declined if c >= dispatch.settled and c not in dispatch.done}
        dispatch = _with(dispatch, event.worker, declined=frozenset(declined | {event.closure}))
        return changed(dispatch, returned=tuple(sorted((*dispatch.returned, event.closure)))), []
    if event.outcome == "staged":
        return _advance_round(dispatch, event)
    return _finish(dispatch, {event.closure}), [
        events.Finish(closure=event.closure, outcome=event.outcome, arrived=True)
    ]


def _lose(dispatch: Dispatch, event: events.Lost) -> tuple[Dispatch, list[events.Command]]:
    known = dispatch.workers.get(event.worker, Worker())
    if known.state == "fencing" and event.epoch == known.epoch:
        return _with(dispatch, event.worker, waits=False), []
    if event.worker not in dispatch.workers:  # it was never there: a worker like others that are not
        return _clear_declined(_with(dispatch, event.worker)), []
    if known.state != "ready" or event.epoch != known.epoch:
        return dispatch, []
    dispatch = _clear_declined(_with(dispatch, event.worker, state="fencing", waits=False))
    fence = Fence(generation=dispatch.generation, fenced=event.worker, below=known.epoch + 1)
    return _ask(dispatch, event.worker, Recovery(), fence)


def _ask(
    dispatch: Dispatch, worker: int, recovery: Recovery, message: Message
) -> tuple[Dispatch, list[events.Command]]:
    """Asks every shard something about a lost worker."""
    shards = range(dispatch.num_shards)
    recovery = changed(recovery, asks=message, unanswered=frozenset(shards))
    dispatch = changed(dispatch, recoveries={**dispatch.recoveries, worker: recovery})
    if not shards:  # of functions without a state there is nobody to ask
        return _next_question(dispatch, worker, recovery)
    return dispatch, [events.Tell(shard=shard, message=message) for shard in shards]


def _take_answer(dispatch: Dispatch, event: events.Answered) -> tuple[Dispatch, list[events.Command]]:
    message = event.message
    if message.generation != dispatch.generation:
        return dispatch, []
    if isinstance(message, Restore):
        return changed(dispatch, restoring=dispatch.restoring - {event.shard}), []
    if dispatch.rounds is not None and message == dispatch.rounds.asks:
        return _advance_round(dispatch, event)
    asked = [(w, recovery) for w, recovery in dispatch.recoveries.items() if recovery.asks == message]
    if not asked or event.shard not in asked[0][1].unanswered:
        return dispatch, []
    worker, recovery = asked[0]
    recovery = changed(recovery, unanswered=recovery.unanswered - {event.shard})
    if isinstance(event.answer, Held):
        recovery = changed(recovery, held={**recovery.held, event.shard: event.answer})
    dispatch = changed(dispatch, recoveries={**dispatch.recoveries, worker: recovery})
    return (dispatch, []) if recovery.unanswered else _next_question(dispatch, worker, recovery)


def _next_question(dispatch: Dispatch, worker: int, recovery: Recovery) -> tuple[Dispatch, list[events.Command]]:
    """Goes on once all shards have answered: fence, then commit, then drop, then the worker is sorted out."""
    generation, message = dispatch.generation, recovery.asks
    if isinstance(message, Fence):
        closures = dispatch.workers[worker].closures
        commit = tuple(c for c in closures if _takes_effect(c, recovery.held.values()))
        if dispatch.rounds is not None:  # nobody is sure of what it was computed from; it is computed again
            commit = ()
        recovery = changed(recovery, commit=commit, drop=tuple(c for c in closures if c not in commit))
        if commit:
            return _ask(dispatch, worker, recovery, Commit(generation=generation, closures=commit))
    if not isinstance(message, Drop) and recovery.drop:
        below = dispatch.workers[worker].epoch + 1
        drop = Drop(generation=generation, closures=recovery.drop, of=worker, below=below)
        return _ask(dispatch, worker, recovery, drop)
    results = {c: ref for held in recovery.held.values() for c, ref in held.results}
    known = dispatch.workers[worker]
    dispatch = changed(
        dispatch,
        returned=tuple(sorted({*dispatch.returned, *recovery.drop})),
        recoveries={w: other for w, other in dispatch.recoveries.items() if w != worker},
    )
    dispatch = _finish(_with(dispatch, worker, state="absent", waits=False, closures=()), set(recovery.commit))
    if known.waits:
        dispatch, _ = _register(dispatch, events.Registered(worker=worker))
    return dispatch, [events.Finish(closure=c, result=results.get(c)) for c in recovery.commit]


def _takes_effect(closure: int, held: Collection[Held]) -> bool:
    """Returns whether to commit a lost worker's closure: applied anywhere, or one attempt staged everywhere."""
    if not held:
        return False
    everywhere = frozenset.intersection(*(shard.staged for shard in held))
    return any(closure in shard.applied for shard in held) or closure in {c for c, _ in everywhere}


def _roll_back(dispatch: Dispatch, event: events.Rollback) -> tuple[Dispatch, list[events.Command]]:
    generation, rounds = max(dispatch.generation + 1, event.generation), dispatch.rounds
    undone = [c for c in range(event.settled, dispatch.next) if c not in event.applied]
    again = sum(c < dispatch.settled or c in dispatch.done for c in undone)
    workers = {
        w: changed(
            known,
            closures=(),
            declined=frozenset(),
            state="absent" if known.state == "fencing" else known.state,
            waits=False,
        )
        for w, known in dispatch.workers.items()
    }
    joining = [w for w, known in dispatch.workers.items() if known.state == "fencing" and known.waits]
    shards = range(dispatch.num_shards)
    dispatch = changed(
        dispatch,
        generation=generation,
        returned=tuple(undone),
        done=frozenset(event.applied),
        settled=event.settled,
        workers=workers,
        recoveries={},
        restoring=frozenset(shards),
        rounds=rounds and Rounds(size=rounds.size, spare=rounds.spare, version=event.version),
    )
    for worker in joining:
        dispatch, _ = _register(dispatch, events.Registered(worker=worker))
    restore = Restore(generation=generation, version=event.version, settled=event.settled, applied=event.applied)
    return dispatch, [
        *([events.Rerun(count=again)] if again else []),
        *(events.Tell(shard=s, message=restore) for s in shards),
    ]


def _is_exhausted(dispatch: Dispatch) -> bool:
    """Returns whether no worker has a closure, nor will get one."""
    is_held = any(known.closures for known in dispatch.workers.values())
    return not is_held and not dispatch.returned and dispatch.next == dispatch.scheduled


def _end_of_round(dispatch: Dispatch) -> int:
    """Returns below which number closures may be handed out: in synchronous mode as many as an update takes."""
    if dispatch.rounds is None:
        return dispatch.scheduled
    if dispatch.rounds.asks is not None or dispatch.rounds.chosen:
        return dispatch.settled  # what is computed now would be computed from old parameters
    end, left = dispatch.settled, dispatch.rounds.size + dispatch.rounds.spare
    while left and end < dispatch.scheduled:
        left -= end not in dispatch.done
        end += 1
    return end


def _advance_round(
    dispatch: Dispatch, event: events.Reported | events.Decided | events.Answered | None
) -> tuple[Dispatch, list[events.Command]]:
    """Tells the round of an event, and takes over what that leads to."""
    assert dispatch.rounds is not None  # asynchronous mode has no such events
    turn = sync_rounds.handle(dispatch.rounds, event, generation=dispatch.generation, num_shards=dispatch.num_shards)
    dispatch = changed(dispatch, rounds=turn.rounds, returned=tuple(sorted({*dispatch.returned, *turn.returned})))
    outcome = "done" if turn.commit else "void"
    finished = [events.Finish(closure=c, outcome=outcome, arrived=True) for c in sorted(turn.finished)]
    return _finish(dispatch, set(turn.finished)), [*turn.commands, *finished]


def _finish(dispatch: Dispatch, closures: set[int]) -> Dispatch:
    done, settled = dispatch.done | closures, dispatch.settled
    while settled in done:
        settled += 1
    return changed(dispatch, settled=settled, done=frozenset(c for c in done if c >= settled))


def _clear_declined(dispatch: Dispatch) -> Dispatch:
    """Forgets what workers have declined: which are there has changed, and with it what each can compute."""
    workers = {w: changed(known, declined=frozenset()) for w, known in dispatch.workers.items()}
    return changed(dispatch, workers=workers)


def _with(dispatch: Dispatch, worker: int, **changes: Any) -> Dispatch:
    known = changed(dispatch.workers.get(worker) or Worker(), **changes)
    return changed(dispatch, workers={**dispatch.workers, worker: known})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worker:
    """The coordinator's view of one worker.

    Attributes:
        epoch: its present epoch, or the one that its next incarnation begins after.
        state: "absent", "ready", or "fencing": lost, and its closures are not sorted out yet.
        waits: whether a new incarnation is connected, which may begin once the old one is sorted out.
        closures: what it has.
        declined: what it cannot compute while the same workers are there.
    """

    epoch: int = 0
    state: Literal["absent", "ready", "fencing"] = "absent"
    waits: bool = False
    closures: tuple[int, ...] = ()
    declined: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recovery:
    """A lost worker's closures, while they are sorted out.

    Attributes:
        held: what each shard that has answered the fence has of them.
        commit: closures that all shards commit; known once all have answered the fence.
        drop: the others, which go back into the queue.
        unanswered: shards that have not answered the present question.
        asks: the question.
    """

    held: Mapping[int, Held] = dataclasses.field(default_factory=dict)
    commit: tuple[int, ...] = ()
    drop: tuple[int, ...] = ()
    unanswered: frozenset[int] = frozenset()
    asks: Message | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dispatch:
    """The coordinator's state; immutable.

    Attributes:
        depth: closures that a worker may have at a time.
        window: closures that may be handed out beyond the first that is not done.
        generation: the shards' present history.
        scheduled: how many closures were scheduled; their numbers are below.
        next: the first that no worker ever had, but for some that were cancelled.
        returned: those that come before it: taken back from a lost worker, declined by one, or undone.
        done: those at or above `settled` that are done, or will never be.
        settled: all below are done.
        recoveries: of the workers in "fencing".
        restoring: shards that have not yet acknowledged the present history; nothing is handed out meanwhile.
        parts: closures at or above each of these numbers are handed out when all below it are done; rising.
        rounds: the update that is being made, in synchronous mode; None in asynchronous mode.
    """

    num_shards: int
    depth: int = 1
    window: int = 1024
    generation: int = 0
    scheduled: int = 0
    next: int = 0
    returned: tuple[int, ...] = ()
    done: frozenset[int] = frozenset()
    settled: int = 0
    workers: Mapping[int, Worker] = dataclasses.field(default_factory=dict)
    recoveries: Mapping[int, Recovery] = dataclasses.field(default_factory=dict)
    restoring: frozenset[int] = frozenset()
    parts: tuple[int, ...] = ()
    rounds: Rounds | None = None

    @property
    def is_idle(self) -> bool:
        """Returns whether every closure that was scheduled is done."""
        return self.settled == self.scheduled

    def is_waiting(self, closure: int) -> bool:
        """Returns whether a closure waits to be computed: no worker has it."""
        if closure >= max(self.next, self.settled):
            return closure < self.scheduled and closure not in self.done
        return closure in self.returned
