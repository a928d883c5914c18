"""A small world in which the real state machines meet every order of messages, crashes and suspicions.

The coordinator (`Dispatch`) and the shards (`Shard`) are jdist's; a worker is the few lines of the protocol that it has to
follow. What is under way is a set: any of it may arrive next, which is delay and reordering; it may arrive and stay under
way, which is a duplicate, and also a loss of the answer with the repetition that follows. What a dead process
has sent may be lost.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from jdist.ps.protocol import scheduler as coordinator
from jdist.ps.protocol.messages import Apply, Commit, Done, Push, Refused, Replace, Reply
from jdist.ps.protocol.scheduler import Dispatch
from jdist.ps.protocol.scheduler_events import (
    Answered,
    Assign,
    Cancelled,
    Event,
    Finish,
    Lost,
    Parted,
    Registered,
    Reported,
    Rollback,
    Scheduled,
    Tell,
)
from jdist.ps.protocol.shard import Rules, Shard, receive


@dataclasses.dataclass(frozen=True)
class Attempt:
    """An incarnation of a worker.

    Attributes:
        alive: whether its process runs.
        todo: `(generation, closure)` of what it was assigned, the first of it being worked at.
        phase: "idle", "computing", "staging" or "committing".
        waits: shards that have not answered yet.
        attempt: how often the closure was computed before.
        bases: the version of each shard that it computes with.
    """

    alive: bool = True
    todo: tuple[tuple[int, int], ...] = ()
    phase: str = "idle"
    waits: frozenset[int] = frozenset()
    attempt: int = 0
    bases: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Budget:
    """How often what goes wrong may still go wrong, and closures be cancelled or declined."""

    crashes: int = 0
    suspicions: int = 0
    duplicates: int = 0
    rollbacks: int = 0
    cancels: int = 0
    declines: int = 0


@dataclasses.dataclass(frozen=True)
class World:
    """Everything there is.

    Attributes:
        dispatch: the coordinator.
        shards: the shards.
        logs: for each shard the `(closure, worker, epoch)` of its updates since it was restored.
        attempts: `((worker, epoch), attempt)`.
        flying: what is under way: `("shard", number, message)`, `("worker", (worker, epoch), shard, message, answer)`,
            `("told", shard, message, answer)` or `("report", event)`.
        finished: for each closure how often the coordinator called it done.
        cancelled: closures that were.
        budget: what may still go wrong.
    """

    dispatch: Dispatch
    shards: tuple[Shard, ...]
    logs: tuple[tuple[Any, ...], ...]
    attempts: tuple[tuple[tuple[int, int], Attempt], ...] = ()
    flying: frozenset[Any] = frozenset()
    finished: tuple[tuple[int, int], ...] = ()
    cancelled: frozenset[int] = frozenset()
    budget: Budget = Budget()


def start(
    *,
    shards: int,
    workers: int,
    closures: int,
    budget: Budget,
    rules: Rules,
    depth: int = 1,
    parts: tuple[int, ...] = (),
) -> World:
    """A world at the beginning: restored shards, registered workers, closures in parts that begin at `parts`."""
    world = World(
        Dispatch(num_shards=shards, depth=depth), (Shard(rules=rules),) * shards, ((),) * shards, budget=budget
    )
    world = _tell(world, Rollback(settled=0, applied=frozenset()))
    while world.flying:  # the first restore; nothing goes wrong yet
        world = _arrive(world, next(iter(world.flying)), stays=False)
    for worker in range(workers):
        world = _tell(world, Registered(worker=worker))
    for first, end in itertools.pairwise((0, *parts, closures)):
        world = _tell(_tell(world, Parted()) if first else world, Scheduled(count=end - first))
    return world


def moves(world: World) -> Iterator[tuple[str, Callable[[], World]]]:
    """What can happen next, each with what makes the world after it."""
    budget = world.budget

    def fewer(of: str) -> World:
        return dataclasses.replace(world, budget=dataclasses.replace(budget, **{of: getattr(budget, of) - 1}))

    for flying in world.flying:
        yield f"arrives {flying}", lambda flying=flying: _arrive(world, flying, stays=False)
        if budget.duplicates:
            yield f"arrives twice {flying}", lambda flying=flying: _arrive(fewer("duplicates"), flying, stays=True)
        if _sender_is_dead(world, flying):
            lost = world.flying - {flying}
            yield f"is lost {flying}", lambda lost=lost: dataclasses.replace(world, flying=lost)
    for who, attempt in world.attempts:
        worker, epoch = who
        known = world.dispatch.workers[worker]
        current = known.epoch == epoch and known.state == "ready"
        missed = Lost(worker=worker, epoch=epoch)
        if attempt.alive and attempt.phase == "computing":
            yield f"computes {who}", lambda who=who: _computed(world, who)
        if attempt.alive and budget.crashes:
            dead = dataclasses.replace(attempt, alive=False)
            yield f"dies {who}", lambda who=who, dead=dead: _attempt(fewer("crashes"), who, dead)
        if current and budget.declines and _can_decline(world, who):
            yield f"declines {who}", lambda who=who: _declined(fewer("declines"), who)
        if current and not attempt.alive:
            yield f"is missed {who}", lambda missed=missed: _tell(world, missed)
        if current and attempt.alive and budget.suspicions:
            yield f"is suspected {who}", lambda missed=missed: _tell(fewer("suspicions"), missed)
    for worker, known in world.dispatch.workers.items():
        if known.state == "absent" or (known.state == "fencing" and not known.waits):
            yield f"comes back {worker}", lambda worker=worker: _tell(world, Registered(worker=worker))
    if budget.rollbacks:
        for i, shard in enumerate(world.shards):
            empty = Shard(rules=shard.rules)
            forgotten = Rollback(settled=0, applied=world.cancelled)  # the snapshot is the beginning
            yield (
                f"shard {i} forgets",
                lambda i=i, empty=empty, forgotten=forgotten: _tell(
                    _shard(fewer("rollbacks"), i, empty, ()), forgotten
                ),
            )
    for c in range(world.dispatch.scheduled if budget.cancels else 0):
        if world.dispatch.is_waiting(c) and c not in dict(world.finished):
            cancelled = Cancelled(only=frozenset({c}))
            yield f"is cancelled {c}", lambda cancelled=cancelled: _tell(fewer("cancels"), cancelled)


def problem(world: World) -> str | None:
    """What breaks the promise in this world; None if nothing does."""
    for log in world.logs:
        if len({entry[0] for entry in log}) < len(log):
            return f"a closure took effect twice: {log}"
        for part in world.dispatch.parts:
            if [entry[0] >= part for entry in log] != sorted(entry[0] >= part for entry in log):
                return f"closures from {part} on took effect before others: {log}"
    if world.flying or any(True for _ in moves(dataclasses.replace(world, budget=Budget()))):
        return None
    if not world.dispatch.is_idle:
        return "nothing can happen any more, and not all closures are done"
    if any(sorted(log) != sorted(world.logs[0]) for log in world.logs):
        return f"closures took effect on some shards only, or by two computations: {world.logs}"
    expected = sorted({*range(world.dispatch.scheduled)} - world.cancelled)
    if sorted(entry[0] for entry in world.logs[0]) != expected:
        return f"{expected} were to take effect; these did: {world.logs[0]}"
    return None


def _tell(world: World, event: Event) -> World:
    """An event at the coordinator."""
    dispatch, commands = coordinator.handle(world.dispatch, event)
    world = dataclasses.replace(world, dispatch=dispatch)
    for worker, known in dispatch.workers.items():  # a registration has a process behind it
        if known.state == "ready" and (worker, known.epoch) not in dict(world.attempts):
            world = _attempt(world, (worker, known.epoch), Attempt())
    for command in commands:
        match command:
            case Tell():
                world = _send(world, ("shard", command.shard, command.message))
            case Assign():
                who = command.worker, command.epoch
                attempt = dict(world.attempts)[who]
                todo = *attempt.todo, *((command.generation, c) for c in command.closures)
                if attempt.alive:
                    world = _work(_attempt(world, who, dataclasses.replace(attempt, todo=todo)), who)
            case Finish(outcome="void"):
                if command.closure in world.cancelled:
                    raise AssertionError(f"{command.closure} was cancelled twice")
                world = dataclasses.replace(world, cancelled=world.cancelled | {command.closure})
            case Finish():
                times = dict(world.finished)
                times[command.closure] = times.get(command.closure, 0) + 1
                world = dataclasses.replace(world, finished=tuple(sorted(times.items())))
    return world


def _arrive(world: World, flying: Any, *, stays: bool) -> World:
    if not stays:
        world = dataclasses.replace(world, flying=world.flying - {flying})
    match flying:
        case ("shard", i, message):
            shard, commands = receive(world.shards[i], message)
            log = world.logs[i]
            for command in commands:
                match command:
                    case Replace():
                        log = ()
                    case Apply():
                        log = (*log, *(ref for ref, _ in command.gradients))
                    case Reply(call=None):
                        world = _send(world, ("told", i, message, command.answer))
                    case Reply():
                        world = _send(world, ("worker", command.call, i, message, command.answer))
            return _shard(world, i, shard, log)
        case ("worker", who, i, message, answer):
            return _answer(world, who, i, message, answer)
        case ("told", i, message, answer):
            return _tell(world, Answered(shard=i, message=message, answer=answer))
        case ("report", event):
            return _tell(world, event)
    raise AssertionError(flying)


def _work(world: World, who: tuple[int, int]) -> World:
    """An idle worker begins with the first that it has to do."""
    attempt = dict(world.attempts)[who]
    if attempt.phase != "idle" or not attempt.todo:
        return world
    # A pull takes no time here, and its order with other messages makes no difference but to how late a gradient is.
    attempt = dataclasses.replace(attempt, phase="computing", bases=tuple(shard.version for shard in world.shards))
    return _attempt(world, who, attempt)


def _can_decline(world: World, who: tuple[int, int]) -> bool:
    """Whether a worker's first closure has not begun, and reads what another one has, which is there."""
    attempt, ready = dict(world.attempts)[who], {w for w, k in world.dispatch.workers.items() if k.state == "ready"}
    if attempt.phase != "computing" or attempt.attempt or attempt.todo[0][0] != world.dispatch.generation:
        return False
    owner = attempt.todo[0][1] % len(world.dispatch.workers)
    return owner != who[0] and owner in ready


def _declined(world: World, who: tuple[int, int]) -> World:
    attempt = dict(world.attempts)[who]
    generation, closure = attempt.todo[0]
    event = Reported(worker=who[0], epoch=who[1], generation=generation, closure=closure, outcome="declined")
    rest = dataclasses.replace(attempt, todo=attempt.todo[1:], phase="idle")
    return _tell(_work(_attempt(world, who, rest), who), event)


def _computed(world: World, who: tuple[int, int]) -> World:
    """A worker has its gradients."""
    attempt = dict(world.attempts)[who]
    generation, closure = attempt.todo[0]
    every = range(len(world.shards))
    world = _attempt(world, who, dataclasses.replace(attempt, phase="staging", waits=frozenset(every)))
    for i in every:
        message = Push(
            stage=len(world.shards) > 1,
            call=who,
            generation=generation,
            worker=who[0],
            epoch=who[1],
            closure=closure,
            attempt=attempt.attempt,
            base=attempt.bases[i],
            gradients=(closure, *who, attempt.attempt),
        )
        world = _send(world, ("shard", i, message))
    return world


def _answer(world: World, who: tuple[int, int], i: int, message: Any, answer: Any) -> World:
    """A shard's answer at a worker."""
    attempt = dict(world.attempts)[who]
    if not attempt.alive or not attempt.todo:
        return world
    generation, closure = attempt.todo[0]
    asked = Commit if attempt.phase == "committing" else Push
    about = message.closures[0] if isinstance(message, Commit) else message.closure
    if (message.generation, about) != (generation, closure) or not isinstance(message, asked) or i not in attempt.waits:
        return world
    if isinstance(message, Push) and message.attempt != attempt.attempt:
        return world
    if isinstance(answer, Refused) and answer.reason == "stale":
        again = dataclasses.replace(attempt, phase="idle", waits=frozenset(), attempt=attempt.attempt + 1)
        return _work(_attempt(world, who, again), who)
    if isinstance(answer, Refused):
        assert answer.reason in ("generation", "empty", "fenced"), (message, answer)
        rest = attempt.todo[1:] if answer.reason in ("generation", "empty") else ()
        return _work(_attempt(world, who, Attempt(alive=answer.reason != "fenced", todo=rest)), who)
    assert isinstance(answer, Done)
    waits = attempt.waits - {i}
    if waits:
        return _attempt(world, who, dataclasses.replace(attempt, waits=waits))
    if attempt.phase == "staging" and len(world.shards) > 1:
        every = frozenset(range(len(world.shards)))
        world = _attempt(world, who, dataclasses.replace(attempt, phase="committing", waits=every))
        commit = Commit(call=who, generation=generation, worker=who[0], epoch=who[1], closures=(closure,))
        for i in every:
            world = _send(world, ("shard", i, commit))
        return world
    world = _attempt(world, who, Attempt(todo=attempt.todo[1:]))
    report = Reported(worker=who[0], epoch=who[1], generation=generation, closure=closure)
    return _work(_send(world, ("report", report)), who)


def _sender_is_dead(world: World, flying: Any) -> bool:
    attempts = dict(world.attempts)
    match flying:
        case ("shard", _, message) if message.call is not None:
            return not attempts[message.call].alive
        case ("report", event):
            return not attempts[event.worker, event.epoch].alive
    return False


def _send(world: World, flying: Any) -> World:
    return dataclasses.replace(world, flying=world.flying | {flying})


def _attempt(world: World, who: tuple[int, int], attempt: Attempt) -> World:
    return dataclasses.replace(
        world, attempts=tuple(sorted({**dict(world.attempts), who: attempt}.items(), key=lambda item: item[0]))
    )


def _shard(world: World, i: int, shard: Shard, log: tuple[Any, ...]) -> World:
    return dataclasses.replace(
        world,
        shards=(*world.shards[:i], shard, *world.shards[i + 1 :]),
        logs=(*world.logs[:i], log, *world.logs[i + 1 :]),
    )
