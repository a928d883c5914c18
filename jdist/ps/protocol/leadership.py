"""Which of a shard's two copies leads, as a pure state machine: (replicas, event) -> (replicas, commands).

The coordinator alone decides that, so there is one opinion. A leader has a backup *in sync* once it has said so itself: from
then on it acknowledges nothing that the backup does not hold, until it is told otherwise under a higher term. So that backup
may take its place at any moment, and no other may.
"""

from __future__ import annotations

import dataclasses

_NOBODY = (None, None)
Pair = tuple[str | None, str | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leadership:
    """What the coordinator knows of a shard's copies; immutable.

    Attributes:
        term: the present leader's.
        leader: the copy that leads: 0 or 1.
        told: whether it has said so itself.
        joining: the incarnation of the other copy that it was told to bring into step; None if it was not.
        holds: of each copy the incarnation that has all that was ever acknowledged; None if it does not.
        heard: of each copy the incarnation that answers; None while it is silent.
        begins: whether a job begins, which brings its own state: what the copies have does not matter.
    """

    term: int = 0
    leader: int = 0
    told: bool = False
    joining: str | None = None
    holds: Pair = _NOBODY
    heard: Pair = _NOBODY
    begins: bool = False

    @property
    def other(self) -> int:
        """The copy that does not lead."""
        return 1 - self.leader


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heard:
    """Event: a copy has answered.

    Attributes:
        copy: which.
        incarnation: its process.
        term: the highest that it knows.
        leads: whether it leads under it.
        in_sync: the incarnation of the backup without which it acknowledges nothing; None if there is none.
    """

    copy: int
    incarnation: str
    term: int
    leads: bool
    in_sync: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Silent:
    """Event: a copy has not answered for long.

    Attributes:
        copy: which.
    """

    copy: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """Event: the leader of a term does not reach the other copy, which answers here.

    Attributes:
        term: which.
    """

    term: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lead:
    """Command: have a copy lead; repeated until it says that it does.

    Attributes:
        copy: which.
        incarnation: its process; another one in its place must refuse.
        term: under which term.
        backup: the incarnation of the other copy that it brings into step; None for none.
        anew: whether it leads even if its state is a part of an earlier leader's only, as a state of the job's own comes next.
    """

    copy: int
    incarnation: str
    term: int
    backup: str | None
    anew: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leads:
    """Command: tell everybody who leads.

    Attributes:
        copy: which.
        term: under which term.
    """

    copy: int
    term: int


@dataclasses.dataclass(frozen=True)
class Forgotten:
    """Command: both copies are lost; go back to the snapshot."""


Event = Heard | Silent | Cut
Command = Lead | Leads | Forgotten


def begin(*, term: int, heard: Pair) -> tuple[Leadership, list[Command]]:
    """The first term: copy 0 leads, or copy 1 if that alone is there.

    Args:
        term: above all that any copy knows.
        heard: each copy's incarnation; one must be there.
    """
    leader = 0 if heard[0] is not None else 1
    holds = _put(_NOBODY, leader, heard[leader])
    replicas = Leadership(term=term, leader=leader, holds=holds, heard=heard, joining=heard[1 - leader], begins=True)
    return replicas, _lead(replicas)


def handle(replicas: Leadership, event: Event) -> tuple[Leadership, list[Command]]:
    """What is known after an event, and what is to be done."""
    if isinstance(event, Cut):
        if event.term != replicas.term:
            return replicas, []
        # Under another term the leader acknowledges alone, and begins to bring the other into step again.
        leads = replicas.holds[replicas.leader]
        return _next(replicas, leader=replicas.leader, holds=_put(_NOBODY, replicas.leader, leads))
    incarnation = event.incarnation if isinstance(event, Heard) else None
    replicas = dataclasses.replace(replicas, heard=_put(replicas.heard, event.copy, incarnation))
    commands: list[Command] = []
    of_leader = event.copy == replicas.leader and incarnation == replicas.holds[replicas.leader]
    if isinstance(event, Heard) and of_leader:
        if event.term < replicas.term:
            commands = _lead(replicas)  # it has not heard of it yet
        elif event.term == replicas.term and event.leads:
            if not replicas.told:
                commands = [Leads(copy=replicas.leader, term=replicas.term)]
            replicas = dataclasses.replace(replicas, told=True, begins=False)
            if replicas.joining is not None and event.in_sync == replicas.joining:
                holds = _put(replicas.holds, replicas.other, event.in_sync)
                replicas = dataclasses.replace(replicas, joining=None, holds=holds)
    decided, more = _decide(replicas)
    return decided, more or commands  # a decision is about a higher term than what was to be said before


def _decide(replicas: Leadership) -> tuple[Leadership, list[Command]]:
    leader, other = replicas.leader, replicas.other
    leads, backup = replicas.holds[leader], replicas.holds[other]
    there, beside = replicas.heard[leader], replicas.heard[other]
    if there != leads:
        if backup is not None and beside == backup:
            return _next(replicas, leader=other, holds=_put(_NOBODY, other, backup))
        if there is not None and (backup is None or beside is not None):
            found, commands = _next(replicas, leader=leader, holds=_put(_NOBODY, leader, there))
            return found, [Forgotten(), *commands]
        return replicas, []  # whoever has the state may only be slow
    if beside != (replicas.joining or backup) and (replicas.joining or backup) is not None:
        return _next(replicas, leader=leader, holds=_put(_NOBODY, leader, leads))
    if backup is None and beside is not None and replicas.told and replicas.joining is None:
        return _next(replicas, leader=leader, holds=replicas.holds, joining=beside)
    return replicas, []


def _next(
    replicas: Leadership, *, leader: int, holds: Pair, joining: str | None = None
) -> tuple[Leadership, list[Command]]:
    """Another term."""
    found = dataclasses.replace(
        replicas, term=replicas.term + 1, leader=leader, told=False, joining=joining, holds=holds
    )
    return found, _lead(found)


def _lead(replicas: Leadership) -> list[Command]:
    incarnation = replicas.holds[replicas.leader]
    assert incarnation is not None  # who leads has the state
    return [
        Lead(
            copy=replicas.leader,
            incarnation=incarnation,
            term=replicas.term,
            backup=replicas.joining,
            anew=replicas.begins,
        )
    ]


def _put(pair: Pair, copy: int, value: str | None) -> Pair:
    return (value, pair[1]) if copy == 0 else (pair[0], value)
