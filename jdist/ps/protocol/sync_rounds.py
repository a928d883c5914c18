"""Synchronous mode in the coordinator's machine: which closures become one update together.

Closures are handed out as in asynchronous mode, but no more than an update takes (and some to spare), and nothing is committed
by a worker. Once enough are staged on all shards, all from the present parameters, the shell decides whether the mean of their
gradients is finite; then all shards commit them as one update, and the next are handed out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jdist.ps.protocol.messages import Commit, Drop, Message
from jdist.ps.protocol.scheduler_events import Command, Decide, Tell


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """The update that is being made.

    Attributes:
        size: closures that make an update.
        spare: further closures that are handed out with them; those that come last are computed again.
        version: the shards' version.
        staged: closures that are staged on all shards, computed from that version.
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

    @property
    def window(self) -> int:
        """Closures that may be handed out and not be done."""
        return self.size + self.spare

    def begun_anew(self, version: int) -> Rounds:
        """After a rollback to a version nothing is staged."""
        return Rounds(size=self.size, spare=self.spare, version=version)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """What something that happens to a round leads to.

    Attributes:
        rounds: afterwards.
        commands: what the shell has to do.
        finished: closures that are done by it.
        commit: whether they took effect.
        returned: closures that are to be computed again.
    """

    rounds: Rounds
    commands: Sequence[Command] = ()
    finished: frozenset[int] = frozenset()
    commit: bool = True
    returned: frozenset[int] = frozenset()


def staged(rounds: Rounds, closure: int, *, base: int, generation: int, num_shards: int) -> Turn:
    """A closure is staged on all shards; its gradients are of the version `base`."""
    which = "staged" if base == rounds.version else "stale"
    return _next(dataclasses.replace(rounds, **{which: getattr(rounds, which) | {closure}}), generation, num_shards)


def decided(rounds: Rounds, closures: tuple[int, ...], *, commit: bool, generation: int, num_shards: int) -> Turn:
    """The shell has decided about the chosen closures."""
    if closures != rounds.chosen or rounds.asks is not None:
        return Turn(rounds=rounds)
    ask = Commit(generation=generation, closures=closures, as_one=True)
    return _asked(rounds, ask if commit else _drop(generation, closures, rounds.version + 1), num_shards)


def given_up(rounds: Rounds, *, generation: int, num_shards: int) -> Turn:
    """There will not be enough closures for an update, as others have failed: what is staged is forgotten."""
    if rounds.asks is not None or rounds.chosen or not rounds.staged:
        return Turn(rounds=rounds)
    chosen = tuple(sorted(rounds.staged))
    rounds = dataclasses.replace(rounds, chosen=chosen)
    return _asked(rounds, _drop(generation, chosen, rounds.version + 1), num_shards)


def answered(rounds: Rounds, shard: int, message: Message, *, generation: int, num_shards: int) -> Turn:
    """A shard has answered what all were asked."""
    if message != rounds.asks or shard not in rounds.unanswered:
        return Turn(rounds=rounds)
    rounds = dataclasses.replace(rounds, unanswered=rounds.unanswered - {shard})
    if rounds.unanswered:
        return Turn(rounds=rounds)
    finished, returned = frozenset[int](), frozenset[int]()
    rounds = dataclasses.replace(rounds, asks=None)
    if rounds.chosen:
        finished, others = frozenset(rounds.chosen), rounds.staged - frozenset(rounds.chosen)
        if isinstance(message, Commit):
            rounds = dataclasses.replace(
                rounds, version=rounds.version + 1, staged=frozenset(), stale=rounds.stale | others
            )
        else:
            rounds = dataclasses.replace(rounds, staged=others)
        rounds = dataclasses.replace(rounds, chosen=())
    elif isinstance(message, Drop):
        returned = frozenset(message.closures)
        rounds = dataclasses.replace(rounds, stale=rounds.stale - returned)
    turn = _next(rounds, generation, num_shards)
    return dataclasses.replace(turn, finished=finished, commit=isinstance(message, Commit), returned=returned)


def _next(rounds: Rounds, generation: int, num_shards: int) -> Turn:
    """What is stale is forgotten first, then enough for an update are chosen."""
    if rounds.asks is not None or rounds.chosen:
        return Turn(rounds=rounds)
    if rounds.stale:
        return _asked(rounds, _drop(generation, tuple(sorted(rounds.stale)), rounds.version), num_shards)
    if len(rounds.staged) < rounds.size:
        return Turn(rounds=rounds)
    chosen = tuple(sorted(rounds.staged))[: rounds.size]
    return Turn(rounds=dataclasses.replace(rounds, chosen=chosen), commands=[Decide(closures=chosen)])


def _drop(generation: int, closures: tuple[int, ...], below: int) -> Drop:
    return Drop(generation=generation, closures=closures, of=None, below=below)


def _asked(rounds: Rounds, message: Message, num_shards: int) -> Turn:
    shards = range(num_shards)
    rounds = dataclasses.replace(rounds, asks=message, unanswered=frozenset(shards))
    return Turn(rounds=rounds, commands=[Tell(shard=shard, message=message) for shard in shards])
