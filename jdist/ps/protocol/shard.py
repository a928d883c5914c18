"""One shard of the state as a pure state machine: (shard, message) -> (shard, commands).

It has no lock, clock, socket or array. docs/parameter_server_protocol.md says what each message does and why. The shell,
`jdist/ps/server/shard_server.py`, holds the arrays, hands messages in one at a time and carries out the commands in their
order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from jdist.ps.protocol import messages


def receive(shard: Shard, message: messages.Message) -> tuple[Shard, list[messages.Command]]:
    """Returns the shard after a message, and what the shell has to do, in this order.

    Each message is replied to once: now or, if the shard is frozen, after its thaw.
    """
    if isinstance(message, messages.Restore):
        return _restore(shard, message)
    if (reason := _reason_to_refuse(shard, message)) is not None:
        return shard, _refuse(shard, message, reason)
    shard, forgotten = _settle(shard, message.settled)
    shard, commands = _take(shard, message)
    return shard, [*forgotten, *commands]


def _reason_to_refuse(shard: Shard, message: messages.Message) -> messages.Reason | None:
    if shard.generation == 0:
        return "empty"
    if message.generation != shard.generation:  # a higher one has to begin by a restore
        return "generation"
    if message.worker is not None and message.epoch < shard.fences.get(message.worker, 0):
        return "fenced"
    return None


def _take(shard: Shard, message: messages.Message) -> tuple[Shard, list[messages.Command]]:
    match message:
        case messages.Pull():
            changed = message.known != shard.version
            return shard, [
                messages.Reply(call=message.call, answer=messages.Parameters(version=shard.version, changed=changed))
            ]
        case messages.Push():
            return _admit(shard, message)
        case messages.Commit():
            return _commit(shard, message)
        case messages.Drop():
            return _drop(shard, message)
        case messages.Fence():
            return _fence(shard, message)
        case messages.Snapshot(phase="freeze"):
            number = max(shard.frozen, message.number) if message.number > shard.thawed else shard.frozen
            return _done(messages.changed(shard, frozen=number), message)
        case messages.Snapshot(phase="thaw"):
            return _thaw(shard, message)
        case messages.Snapshot() if shard.frozen == message.number:
            answer = messages.Cut(version=shard.version, applied=frozenset(shard.applied), settled=shard.settled)
            return shard, [messages.Reply(call=message.call, answer=answer)]
    return shard, _refuse(shard, message, "unknown")


def _admit(shard: Shard, message: messages.Push) -> tuple[Shard, list[messages.Command]]:
    """Takes the gradients of a push."""
    number, earlier = message.closure, shard.staged.get(message.closure)
    sender = message.worker, message.epoch
    is_repeated = earlier is not None and (earlier.worker, earlier.epoch, earlier.attempt) == (*sender, message.attempt)
    if number < shard.settled or number in shard.applied or is_repeated:
        return _done(shard, message, before=_forget_arrays(message))
    if earlier is not None and ((earlier.worker, earlier.epoch) != sender or earlier.attempt > message.attempt):
        return shard, _refuse(shard, message, "staged")
    if shard.frozen:
        return messages.changed(shard, waiting=(*shard.waiting, message)), []
    rules = shard.rules
    if not message.finite and rules.non_finite == "raise":
        return shard, _refuse(shard, message, "non_finite")
    staleness = shard.version - message.base
    is_stale = rules.max_staleness is not None and staleness > rules.max_staleness
    if staleness < 0 or (is_stale and rules.on_stale == "refuse"):  # below 0: of a version that is still to come
        return shard, _refuse(shard, message, "stale")
    skip = not message.finite and rules.non_finite == "skip"
    entry = Staged(
        worker=message.worker,
        epoch=message.epoch,
        attempt=message.attempt,
        base=message.base,
        gradients=None if skip else message.gradients,
        weight=1 / (1 + staleness) if is_stale else 1.0,
        result=message.result,
    )
    shard = messages.changed(shard, staged={**shard.staged, number: entry})
    before = _forget(message.gradients) if skip else []
    before += [] if earlier is None else _forget(earlier.gradients, earlier.result)
    if not message.stage:
        shard, applied = _apply(shard, (number,))
        before += applied
    return _done(shard, message, before=before)


def _commit(shard: Shard, message: messages.Commit) -> tuple[Shard, list[messages.Command]]:
    todo = tuple(c for c in message.closures if c >= shard.settled and c not in shard.applied)
    if any(c not in shard.staged for c in todo) or (message.as_one and 0 < len(todo) < len(message.closures)):
        return shard, _refuse(shard, message, "unknown")
    commands: list[messages.Command] = []
    for closures in [todo] if message.as_one and todo else [(c,) for c in todo]:
        shard, applied = _apply(shard, closures, message.scalars)
        commands += applied
    return _done(shard, message, before=[*commands, *_forget_arrays(message)])


def _apply(
    shard: Shard, closures: tuple[int, ...], scalars: messages.Ref | None = None
) -> tuple[Shard, list[messages.Command]]:
    """Makes one update of what is staged of these closures; none if all their gradients are left out."""
    entries = [shard.staged[c] for c in closures]
    gradients = tuple((entry.gradients, entry.weight) for entry in entries if entry.gradients is not None)
    version = shard.version + bool(gradients)
    commands: list[messages.Command] = (
        [messages.Apply(gradients=gradients, version=version, scalars=scalars)] if gradients else []
    )
    commands += _forget(*(ref for ref, _ in gradients))
    done = {c: Applied(worker=shard.staged[c].worker, result=shard.staged[c].result) for c in closures}
    shard = messages.changed(
        shard,
        version=version,
        staged={c: entry for c, entry in shard.staged.items() if c not in done},
        applied={**shard.applied, **done},
    )
    return shard, commands


def _drop(shard: Shard, message: messages.Drop) -> tuple[Shard, list[messages.Command]]:
    dropped = {
        c: entry
        for c, entry in shard.staged.items()
        if c in message.closures
        and (
            entry.base < message.below
            if message.of is None
            else (entry.worker == message.of and entry.epoch < message.below)
        )
    }
    kept = {c: entry for c, entry in shard.staged.items() if c not in dropped}
    refs = [ref for entry in dropped.values() for ref in (entry.gradients, entry.result)]
    return _done(messages.changed(shard, staged=kept), message, before=_forget(*refs))


def _fence(shard: Shard, message: messages.Fence) -> tuple[Shard, list[messages.Command]]:
    worker, below = message.fenced, max(message.below, shard.fences.get(message.fenced, 0))
    gone = [m for m in shard.waiting if m.worker == worker and m.epoch < below]
    shard = messages.changed(
        shard,
        fences={**shard.fences, worker: below},
        waiting=tuple(m for m in shard.waiting if m not in gone),
    )
    staged = {c: entry.result for c, entry in shard.staged.items() if entry.worker == worker and entry.epoch < below}
    applied = {c: entry.result for c, entry in shard.applied.items() if entry.worker == worker}
    held = messages.Held(
        version=shard.version,
        staged=frozenset((c, shard.staged[c].attempt) for c in staged),
        applied=frozenset(applied),
        results=tuple((c, result) for c, result in {**staged, **applied}.items() if result is not None),
    )
    refused = [command for m in gone for command in _refuse(shard, m, "fenced")]
    return shard, [*refused, messages.Reply(call=message.call, answer=held)]


def _thaw(shard: Shard, message: messages.Snapshot) -> tuple[Shard, list[messages.Command]]:
    if message.number <= shard.thawed:
        return _done(shard, message)
    waiting, thawed = shard.waiting, message.number
    shard, commands = _done(messages.changed(shard, frozen=0, thawed=thawed, waiting=()), message)
    for push in waiting:
        shard, more = _admit(shard, push)
        commands += more
    return shard, commands


def _settle(shard: Shard, below: int) -> tuple[Shard, list[messages.Command]]:
    if below <= shard.settled:
        return shard, []
    gone = {c: entry for c, entry in shard.applied.items() if c < below}
    kept = {c: entry for c, entry in shard.applied.items() if c >= below}
    return messages.changed(shard, settled=below, applied=kept), _forget(*(entry.result for entry in gone.values()))


def _restore(shard: Shard, message: messages.Restore) -> tuple[Shard, list[messages.Command]]:
    if message.generation <= shard.generation:
        return shard, _refuse(shard, message, "generation")
    kept = [entry.gradients for entry in shard.staged.values()]
    kept += [entry.result for entry in (*shard.staged.values(), *shard.applied.values())]
    waiting = shard.waiting
    shard = Shard(
        rules=shard.rules,
        generation=message.generation,
        version=message.version,
        applied={c: Applied(worker=None) for c in message.applied},
        settled=message.settled,
    )
    late = [command for m in waiting for command in _refuse(shard, m, "generation")]
    return _done(shard, message, before=[*late, *_forget(*kept), messages.Replace(version=message.version)])


def _done(
    shard: Shard, message: messages.Message, *, before: list[messages.Command] | None = None
) -> tuple[Shard, list[messages.Command]]:
    return shard, [*(before or []), messages.Reply(call=message.call, answer=messages.Done(version=shard.version))]


def _refuse(shard: Shard, message: messages.Message, reason: messages.Reason) -> list[messages.Command]:
    answer = messages.Refused(reason=reason, generation=shard.generation)
    return [*_forget_arrays(message), messages.Reply(call=message.call, answer=answer)]


def _forget_arrays(message: messages.Message) -> list[messages.Command]:
    """Forgets the arrays of a message that is refused, repeated or carried out."""
    if isinstance(message, messages.Commit):
        return _forget(message.scalars)
    return _forget(message.gradients, message.result) if isinstance(message, messages.Push) else []


def _forget(*refs: messages.Ref | None) -> list[messages.Command]:
    return [messages.Forget(ref=ref) for ref in refs if ref is not None]


NonFinite = Literal["raise", "skip", "apply"]
OnStale = Literal["refuse", "down_weight"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules for gradients that are stale or not finite.

    Attributes:
        max_staleness: updates that may lie between a gradient's version and its admission; None for any number.
        on_stale: what happens beyond: "refuse", or "down_weight" by 1 / (1 + staleness).
        non_finite: "raise" refuses, "skip" changes nothing and counts as done, "apply" applies.
    """

    max_staleness: int | None = None
    on_stale: OnStale = "refuse"
    non_finite: NonFinite = "raise"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staged:
    """A closure's gradients for this shard, admitted and not yet applied; fields as in `Push`, but for these.

    Attributes:
        gradients: the arrays; None if they are not finite and left out.
        weight: 1, or less if they are stale.
    """

    worker: int | None
    epoch: int
    attempt: int
    base: int
    gradients: messages.Ref | None = None
    weight: float
    result: messages.Ref | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Applied:
    """A closure that took effect and is not settled.

    Attributes:
        worker: who computed it; None after a restore, as nobody will ask for its result.
    """

    worker: int | None
    result: messages.Ref | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """The state of one shard; immutable.

    Attributes:
        generation: its history; 0 while it is empty and takes nothing but a restore.
        version: number of updates.
        fences: of each worker the lowest epoch that is not refused.
        staged: closures admitted and not applied.
        applied: closures applied and not settled.
        settled: closures below this number are done.
        frozen: the snapshot for which pushes and stages wait; 0: they do not.
        thawed: the last snapshot that is over.
        waiting: the pushes and stages that wait, in their order.
    """

    rules: Rules = Rules()
    generation: int = 0
    version: int = 0
    fences: Mapping[int, int] = dataclasses.field(default_factory=dict)
    staged: Mapping[int, Staged] = dataclasses.field(default_factory=dict)
    applied: Mapping[int, Applied] = dataclasses.field(default_factory=dict)
    settled: int = 0
    frozen: int = 0
    thawed: int = 0
    waiting: tuple[messages.Push, ...] = ()
