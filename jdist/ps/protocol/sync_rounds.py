"""The rounds of synchronous mode, a part of the coordinator's machine: which closures become one update together.

Closures are handed out as in asynchronous mode, but no more than an update takes (and some to spare), and workers commit
nothing. Once enough are staged on all shards, all from the present parameters, the shell decides whether the mean of their
gradients is finite; then all shards commit them as one update, and the next are handed out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jdist.ps.protocol.messages import Commit, Drop, Message, changed
from jdist.ps.protocol.scheduler_events import Answered, Command, Decide, Decided, Reported, Tell


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """The update that is being made.

    Attributes:
        size: closures that make an update.
        spare: further closures that are handed out with them; those that come last are computed again.
        staged: closures that are staged on all shards, computed from the shards' version.
        chosen: those of them that are to become an update; empty while there are not enough.
        stale: closures that are staged on all shards, computed from an older version.
        asks: what all shards are asked at present.
        unanswered: shards that have not answered.
    """

    size: int
    spare: int = 0
    version: int = 0
    staged: frozenset[int] = frozenset()
    chosen: tuple[int, ...] = ()
    stale: frozenset[int] = frozenset()
    asks: Message | None = None
    unanswered: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """The effect of an event on a round.

    Attributes:
        finished: closures that are done by it; `commit`: whether they took effect.
        returned: closures to compute again.
    """

    rounds: Rounds
    commands: Sequence[Command] = ()
    finished: frozenset[int] = frozenset()
    commit: bool = True
    returned: frozenset[int] = frozenset()


def handle(rounds: Rounds, event: Reported | Decided | Answered | None, *, generation: int, num_shards: int) -> Turn:
    """Returns the effect of an event: a closure is staged, a choice is decided, or a shard has answered the question to all.

    Without an event no further closure will come, as others have failed.
    """
    match event:
        case Reported():
            if event.base == rounds.version:
                rounds = changed(rounds, staged=rounds.staged | {event.closure})
            else:
                rounds = changed(rounds, stale=rounds.stale | {event.closure})
            return _next(rounds, generation, num_shards)
        case Decided() if event.closures == rounds.chosen and rounds.asks is None:
            ask = Commit(generation=generation, closures=event.closures, as_one=True)
            drop = _drop(generation, event.closures, rounds.version + 1)
            return _ask(rounds, ask if event.commit else drop, num_shards)
        case Answered() if event.message == rounds.asks and event.shard in rounds.unanswered:
            rounds = changed(rounds, unanswered=rounds.unanswered - {event.shard})
            return Turn(rounds=rounds) if rounds.unanswered else _go_on(rounds, event.message, generation, num_shards)
        case None if rounds.staged and rounds.asks is None and not rounds.chosen:
            chosen = tuple(sorted(rounds.staged))  # too few for an update
            rounds = changed(rounds, chosen=chosen)
            return _ask(rounds, _drop(generation, chosen, rounds.version + 1), num_shards)
    return Turn(rounds=rounds)


def _go_on(rounds: Rounds, message: Message, generation: int, num_shards: int) -> Turn:
    """Goes on once all shards have answered a message."""
    finished, returned = frozenset(rounds.chosen), frozenset[int]()
    rounds = changed(rounds, asks=None, chosen=())
    if isinstance(message, Commit):
        stale = rounds.stale | (rounds.staged - finished)
        rounds = changed(rounds, version=rounds.version + 1, staged=frozenset(), stale=stale)
    elif finished:
        rounds = changed(rounds, staged=rounds.staged - finished)
    elif isinstance(message, Drop):
        returned = frozenset(message.closures)
        rounds = changed(rounds, stale=rounds.stale - returned)
    turn = _next(rounds, generation, num_shards)
    return changed(turn, finished=finished, commit=isinstance(message, Commit), returned=returned)


def _next(rounds: Rounds, generation: int, num_shards: int) -> Turn:
    """Drops what is stale, else chooses closures for an update once there are enough."""
    if rounds.asks is not None or rounds.chosen:
        return Turn(rounds=rounds)
    if rounds.stale:
        return _ask(rounds, _drop(generation, tuple(sorted(rounds.stale)), rounds.version), num_shards)
    if len(rounds.staged) < rounds.size:
        return Turn(rounds=rounds)
    chosen = tuple(sorted(rounds.staged))[: rounds.size]
    return Turn(rounds=changed(rounds, chosen=chosen), commands=[Decide(closures=chosen)])


def _drop(generation: int, closures: tuple[int, ...], below: int) -> Drop:
    return Drop(generation=generation, closures=closures, of=None, below=below)


def _ask(rounds: Rounds, message: Message, num_shards: int) -> Turn:
    shards = range(num_shards)
    rounds = changed(rounds, asks=message, unanswered=frozenset(shards))
    return Turn(rounds=rounds, commands=[Tell(shard=shard, message=message) for shard in shards])
