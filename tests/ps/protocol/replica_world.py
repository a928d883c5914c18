"""A small world of one shard with two copies, in which the real machines meet every order of messages and losses.

Which copy leads (`leadership`) and what it may do (`replica_role`) are jdist's. A copy's state is the list of closures
that it has applied, since both copies run the same machine. What is under way is a set: any of it may arrive next; with
a budget it may be lost, or arrive and stay under way. A killed process is another one with an empty memory at once: what
it does not answer before is what is lost or late here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jdist.ps.protocol import leadership as coordinator
from jdist.ps.protocol import replica_role
from jdist.ps.protocol.leadership import Announce, Heartbeat, Lead, Leadership, LinkCut, StateLost
from jdist.ps.protocol.replica_role import Role


@dataclasses.dataclass(frozen=True)
class Copy:
    """A process that keeps a copy.

    Attributes:
        born: which of its incarnations it is.
        role: jdist's.
        state: `(generation, closures applied)`; generation 0 is empty.
        copy_is_due, copied: as in `Forwarding`.
        calls: the call to the backup that has no answer yet.
        entries: `(number, closure)` that are to be sent.
        waiting: `(number, closure)` of callers that wait for the backup.
        backup: the incarnation that it sends to.
    """

    born: int = 0
    role: Role = dataclasses.field(default_factory=Role)
    state: tuple[int, tuple[int, ...]] = (0, ())
    copy_is_due: bool = False
    copied: bool = False
    calls: Any = None
    entries: tuple[tuple[int, int], ...] = ()
    waiting: tuple[tuple[int, Any], ...] = ()
    backup: str | None = None

    def incarnation(self, number: int) -> str:
        """Its name."""
        return f"{number}.{self.born}"


@dataclasses.dataclass(frozen=True)
class Budget:
    """How often what goes wrong may still go wrong."""

    kills: int = 0
    suspicions: int = 0
    cuts: int = 0
    losses: int = 0
    duplicates: int = 0
    resets: int = 0
    others: int = 0


@dataclasses.dataclass(frozen=True)
class World:
    """Everything there is.

    Attributes:
        replicas: what the coordinator knows.
        copies: both.
        route: the copy that callers ask.
        generation: the shard's history.
        closures: how many there are.
        acknowledged: those that took effect in this history, as far as callers know; "restore" among them.
        flying: what is under way.
        rollbacks: how often the coordinator went back.
        budget: what may still go wrong.
        is_single: whether copy 1 does not exist (`ps_replicas=1`).
    """

    replicas: Leadership
    copies: tuple[Copy, Copy]
    route: int = 0
    generation: int = 1
    closures: int = 1
    acknowledged: frozenset[Any] = frozenset()
    flying: frozenset[Any] = frozenset()
    rollbacks: int = 0
    budget: Budget = Budget()
    is_single: bool = False


def start(*, closures: int, budget: Budget) -> World:
    """A world in which both copies are in step, and closures are to be pushed."""
    world = begun((Copy(), Copy()), closures=0)
    while found := list(moves(world)):
        world = found[0][1]()
    assert world.replicas.holds == ("0.0", "1.0")
    return dataclasses.replace(world, closures=closures, budget=budget)


def begun(copies: tuple[Copy, Copy], *, closures: int, budget: Budget = Budget(), is_single: bool = False) -> World:
    """A world in which a job begins over what an earlier one left, and nothing has arrived yet."""
    alive = ("0.0", None if is_single else "1.0")
    replicas, commands = coordinator.begin(term=1 + max(copy.role.term for copy in copies), alive=alive)
    generation = 1 + max(copy.state[0] for copy in copies)
    world = World(replicas, copies, closures=closures, generation=generation, budget=budget, is_single=is_single)
    return _commanded(world, commands)


def moves(world: World) -> Iterator[tuple[str, Callable[[], World]]]:
    """What can happen next, each with what makes the world after it."""
    budget = world.budget

    def fewer(of: str) -> World:
        return dataclasses.replace(world, budget=dataclasses.replace(budget, **{of: getattr(budget, of) - 1}))

    for flying in world.flying:
        yield f"arrives {flying}", lambda flying=flying: _arrive(_without(world, flying), flying)
        if budget.duplicates and flying[0] != "heard":
            yield f"arrives twice {flying}", lambda flying=flying: _arrive(fewer("duplicates"), flying)
        if budget.losses and flying[0] != "heard":
            yield f"is lost {flying}", lambda flying=flying: _lost(_without(fewer("losses"), flying), flying)
    for i, copy in enumerate(world.copies[: 2 - world.is_single]):
        heard = _status(i, copy)
        known, commands = coordinator.handle(world.replicas, heard)
        asked = any(f[0] == "heard" and f[1].copy == i for f in world.flying)
        told = all(("lead", c) in world.flying for c in commands) and commands
        if not asked and not told and (known != world.replicas or commands):
            yield f"is asked {i}", lambda heard=heard: _send(world, ("heard", heard))
        if not asked and budget.suspicions and world.replicas.alive[i] is not None:
            yield f"is suspected {i}", lambda i=i: _happened(fewer("suspicions"), Heartbeat(copy=i, incarnation=None))
        if budget.cuts and copy.backup is not None and copy.role.name == "leads":
            cut = LinkCut(term=copy.role.term)
            yield f"is cut off {i}", lambda cut=cut: _happened(fewer("cuts"), cut)
        if budget.kills:
            yield f"is killed {i}", lambda i=i, n=copy.born + 1: _put(fewer("kills"), i, Copy(born=n))
        if budget.resets:
            reset = Copy(born=copy.born + 1, role=Role(term=copy.role.term))
            yield f"fails half-way {i}", lambda i=i, reset=reset: _put(fewer("resets"), i, reset)
        if budget.others:
            term = 1 + copy.role.term
            other = Lead(copy=i, incarnation=copy.incarnation(i), term=term, backup=None, new_job=True)
            yield f"another leads {i}", lambda other=other: _led(fewer("others"), other)
        if copy.backup is not None and copy.calls is None and (copy.copy_is_due or copy.entries):
            yield f"sends {i}", lambda i=i: _calls(world, i)
    for what in ["restore"] if "restore" not in world.acknowledged else range(world.closures):
        call = ("ask", world.generation, what)
        waits = any(w == call for copy in world.copies for _, w in copy.waiting)
        leads = world.copies[world.route].role.name == "leads"
        if what not in world.acknowledged and not any(f[:3] == call for f in world.flying) and leads and not waits:
            yield f"asks {what}", lambda call=call: _send(world, (*call, world.route))


def problem(world: World) -> str | None:
    """What breaks the promise in this world; None if nothing does."""
    done = world.acknowledged - {"restore"}
    for i, copy in enumerate(world.copies):
        has_all = copy.state[0] == world.generation and done <= set(copy.state[1])
        if world.acknowledged and copy.incarnation(i) == world.replicas.holds[i] and not has_all:
            return f"copy {i} counts as holding everything and has {copy.state}, not {done}"
        if len(set(copy.state[1])) < len(copy.state[1]):
            return f"a closure took effect twice: {copy.state}"
    if any(True for _ in moves(dataclasses.replace(world, budget=Budget()))):
        return None
    if len(done) != world.closures:
        return "nothing can happen any more, and not all closures are done"
    if not world.is_single and (world.copies[0].state != world.copies[1].state or None in world.replicas.holds):
        return "nothing can happen any more, and the copies are not in step"
    return None


def _happened(world: World, event: Any) -> World:
    before = world.replicas
    replicas, commands = coordinator.handle(before, event)
    world = dataclasses.replace(world, replicas=replicas)
    if StateLost() in commands:
        alive = [copy.incarnation(i) for i, copy in enumerate(world.copies)]
        assert not {x for x in before.holds if x is not None} & set(alive), "it went back although the state is there"
    return _commanded(world, commands)


def _commanded(world: World, commands: list[Any]) -> World:
    for command in commands:
        match command:
            case Lead():
                world = _send(world, ("lead", command))
            case Announce():
                world = dataclasses.replace(world, route=command.copy)
            case StateLost():
                world = dataclasses.replace(
                    world,
                    generation=world.generation + 1,
                    rollbacks=world.rollbacks + 1,
                    acknowledged=frozenset(),
                    flying=frozenset(f for f in world.flying if f[0] != "ask"),
                )
    return world


def _arrive(world: World, flying: Any) -> World:
    match flying:
        case ("heard", event):
            return _happened(world, event)
        case ("lead", command):
            return _led(world, command)
        case ("ask", generation, what, i):
            return _asked(world, i, generation, what)
        case ("install" | "forward", i, _, _, to, *_) if world.copies[1 - i].incarnation(1 - i) != to:
            return _answered(world, i, world.copies[1 - i], flying, "stranger")
        case ("install", i, term, number, _, state):
            copy = world.copies[1 - i]
            found, took = replica_role.install(copy.role, term=term, number=number)
            if took == "taken":
                copy = Copy(born=copy.born, role=found, state=state)
            return _answered(world, i, copy, flying, took)
        case ("forward", i, term, entries, _):
            copy, took = world.copies[1 - i], "again"
            for number, (generation, closure) in entries:
                role, took = replica_role.take(copy.role, term=term, number=number)
                if took in ("gap", "term"):
                    break
                copy = dataclasses.replace(copy, role=role)
                if took == "taken":
                    assert copy.state[0] == generation
                    copy = dataclasses.replace(copy, state=(generation, (*copy.state[1], closure)))
            return _answered(world, i, copy, flying, took)
        case ("took", i, born, call, took, theirs):
            return _took(world, i, born, call, took, theirs)
    raise AssertionError(flying)


def _lost(world: World, flying: Any) -> World:
    """A call that nobody answers is made again."""
    match flying:
        case ("install" | "forward", i, *_) | ("took", i, *_):
            copy, call = world.copies[i], flying[3] if flying[0] == "took" else flying
            if copy.calls == call:
                due = copy.copy_is_due or call[0] == "install"
                return _put(world, i, dataclasses.replace(copy, calls=None, copy_is_due=due))
    return world


def _led(world: World, command: Lead) -> World:
    copy = world.copies[command.copy]
    if copy.incarnation(command.copy) != command.incarnation:
        return world
    found = replica_role.lead(copy.role, term=command.term, backup=command.backup is not None, new_job=command.new_job)
    if found == copy.role:
        return world
    copy = dataclasses.replace(
        copy, role=found, copy_is_due=True, copied=False, calls=None, entries=(), backup=command.backup
    )
    return _replied(_put(world, command.copy, copy), command.copy)


def _asked(world: World, i: int, generation: int, what: Any) -> World:
    """A caller asks a copy for an update, or to begin a history."""
    copy = world.copies[i]
    if copy.role.name != "leads":
        return world
    if what == "restore":
        if generation > copy.state[0]:
            changed = replica_role.add_entry(copy.role)
            copy = dataclasses.replace(copy, role=changed, state=(generation, ()), copy_is_due=True)
    elif copy.state[0] != generation:
        return world
    elif what not in copy.state[1]:
        changed = replica_role.add_entry(copy.role)
        entry = (changed.number, (generation, what))
        entries = (*copy.entries, entry) if copy.backup is not None else ()
        copy = dataclasses.replace(copy, role=changed, state=(generation, (*copy.state[1], what)), entries=entries)
    waiting = (*copy.waiting, (copy.role.number, ("ask", generation, what)))
    return _replied(_put(world, i, dataclasses.replace(copy, waiting=waiting)), i)


def _replied(world: World, i: int) -> World:
    """Callers that may be told are told."""
    copy = world.copies[i]
    if copy.role.name != "leads":
        return _put(world, i, dataclasses.replace(copy, waiting=()))
    told = [w for w in copy.waiting if replica_role.may_answer(copy.role, w[0])]
    news = {what for _, (_, generation, what) in told if generation == world.generation}
    world = dataclasses.replace(world, acknowledged=world.acknowledged | news)
    return _put(world, i, dataclasses.replace(copy, waiting=tuple(w for w in copy.waiting if w not in told)))


def _calls(world: World, i: int) -> World:
    """A leader calls its backup."""
    copy = world.copies[i]
    term = copy.role.term
    if copy.copy_is_due:
        call = ("install", i, term, copy.role.number, copy.backup, copy.state)
        made = dataclasses.replace(copy, copy_is_due=False, copied=False, entries=(), calls=call)
    else:
        call = ("forward", i, term, copy.entries, copy.backup)
        made = dataclasses.replace(copy, calls=call)
    return _send(_put(world, i, made), call)


def _answered(world: World, i: int, copy: Copy, call: Any, took: str) -> World:
    """The backup of copy `i`, as it is now, answers it."""
    world = _replied(_put(world, 1 - i, copy), 1 - i)
    return _send(world, ("took", i, world.copies[i].born, call, took, copy.role.term))


def _took(world: World, i: int, born: int, call: Any, took: str, theirs: int) -> World:
    """An answer at the leader, if it still waits for it."""
    copy, term, whole = world.copies[i], call[2], call[0] == "install"
    if copy.born != born or copy.calls != call or copy.role.term != term:
        return world
    number, sent = (call[3], 0) if whole else (call[3][-1][0], len(call[3]))
    copy = dataclasses.replace(copy, calls=None)
    if took == "term":
        copy = dataclasses.replace(copy, role=replica_role.depose(copy.role, term=theirs), backup=None, entries=())
    elif took == "stranger":
        copy = dataclasses.replace(copy, calls=call)  # nothing more is sent in this term
    elif took == "gap":
        copy = dataclasses.replace(copy, copy_is_due=not copy.copied)
    else:
        entries = copy.entries[sent:]
        caught_up = not entries and not copy.copy_is_due
        held = replica_role.acknowledge(copy.role, term=term, number=number, caught_up=caught_up)
        copy = dataclasses.replace(copy, role=held, entries=entries, copied=copy.copied or whole)
    return _replied(_put(world, i, copy), i)


def _status(i: int, copy: Copy) -> Heartbeat:
    leads = copy.role.name == "leads"
    backup = copy.backup if leads else None
    in_sync = backup if copy.role.backup == "in_sync" else None
    incarnation, term = copy.incarnation(i), copy.role.term
    return Heartbeat(copy=i, incarnation=incarnation, term=term, leads=leads, backup=backup, in_sync=in_sync)


def _put(world: World, i: int, copy: Copy) -> World:
    return dataclasses.replace(world, copies=(copy, world.copies[1]) if i == 0 else (world.copies[0], copy))


def _send(world: World, flying: Any) -> World:
    return dataclasses.replace(world, flying=world.flying | {flying})


def _without(world: World, flying: Any) -> World:
    return dataclasses.replace(world, flying=world.flying - {flying})
