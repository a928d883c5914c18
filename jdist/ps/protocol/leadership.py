"""The leadership of a shard's two copies, as a pure state machine: (leadership, event) -> (leadership, commands).

The coordinator alone decides which copy leads, so there is one opinion. A backup is *in sync* once the leader has reported
so: from then on the leader acknowledges nothing that the backup does not hold, until it leads under a higher term. So that
backup may take its place at any moment, and no other may.
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
        confirmed: whether it has confirmed that.
        joining: the incarnation of the other copy that it brings into step; None if it does not.
        holds: of each copy the incarnation that has all that was ever acknowledged; None if it does not.
        alive: of each copy the incarnation that answers; None while it is silent.
        is_new_job: whether a job begins, which brings its own state: what the copies have does not matter.
    """

    term: int = 0
    leader: int = 0
    confirmed: bool = False
    joining: str | None = None
    holds: Pair = _NOBODY
    alive: Pair = _NOBODY
    is_new_job: bool = False

    @property
    def other(self) -> int:
        """The copy that does not lead."""
        return 1 - self.leader


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Event: a copy has answered: its process, the highest term that it knows, and whether it leads under that.

    Attributes:
        in_sync: the incarnation of the backup without which it acknowledges nothing; None if there is none.
    """

    copy: int
    incarnation: str
    term: int
    leads: bool
    in_sync: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeartbeatLost:
    """Event: a copy has not answered for long."""

    copy: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkCut:
    """Event: the leader of a term does not reach the other copy, which answers the coordinator."""

    term: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lead:
    """Command: have a copy lead; repeated until it says that it does.

    Attributes:
        incarnation: the copy's process; another one in its place must refuse.
        backup: the incarnation of the other copy that it brings into step; None for none.
        anew: whether it leads even with a part of an earlier leader's state only, as the job brings its own next.
    """

    copy: int
    incarnation: str
    term: int
    backup: str | None
    anew: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Announce:
    """Command: tell everybody which copy leads, under which term."""

    copy: int
    term: int


@dataclasses.dataclass(frozen=True)
class StateLost:
    """Command: go back to the snapshot, as both copies have lost the state."""


Event = Heartbeat | HeartbeatLost | LinkCut
Command = Lead | Announce | StateLost


def begin(*, term: int, alive: Pair) -> tuple[Leadership, list[Command]]:
    """Begins the first term, above all that any copy knows: copy 0 leads, or copy 1 if that alone is there."""
    leader = 0 if alive[0] is not None else 1
    holds = _put(_NOBODY, leader, alive[leader])
    state = Leadership(term=term, leader=leader, holds=holds, alive=alive, joining=alive[1 - leader], is_new_job=True)
    return state, _lead(state)


def handle(state: Leadership, event: Event) -> tuple[Leadership, list[Command]]:
    """Returns what is known after an event, and what is to be done."""
    if isinstance(event, LinkCut):
        if event.term != state.term:
            return state, []
        # Under another term the leader acknowledges alone, and begins to bring the other into step again.
        return _next_term(state, state.leader, state.holds[state.leader])
    incarnation = event.incarnation if isinstance(event, Heartbeat) else None
    state = dataclasses.replace(state, alive=_put(state.alive, event.copy, incarnation))
    commands: list[Command] = []
    if isinstance(event, Heartbeat) and event.copy == state.leader and incarnation == state.holds[state.leader]:
        if event.term < state.term:
            commands = _lead(state)  # it does not know yet that it leads
        elif event.term == state.term and event.leads:
            if not state.confirmed:
                commands = [Announce(copy=state.leader, term=state.term)]
            state = dataclasses.replace(state, confirmed=True, is_new_job=False)
            if state.joining is not None and event.in_sync == state.joining:
                holds = _put(state.holds, state.other, event.in_sync)
                state = dataclasses.replace(state, joining=None, holds=holds)
    state, decision = _decide(state)
    return state, decision or commands  # a decision is about a higher term than the commands before it


def _decide(state: Leadership) -> tuple[Leadership, list[Command]]:
    """Begins another term, if what is known of the copies calls for one."""
    leader, other = state.leader, state.other
    holder, backup = state.holds[leader], state.holds[other]
    present, beside = state.alive[leader], state.alive[other]
    if present != holder:
        if backup is not None and beside == backup:
            return _next_term(state, other, backup)
        if present is not None and (backup is None or beside is not None):
            state, commands = _next_term(state, leader, present)
            return state, [StateLost(), *commands]
        return state, []  # whichever copy has the state may only be slow
    expected = state.joining or backup
    if expected is not None and beside != expected:
        return _next_term(state, leader, holder)
    if backup is None and beside is not None and state.confirmed and state.joining is None:
        return _next_term(state, leader, holder, joining=beside)
    return state, []


def _next_term(
    state: Leadership, leader: int, holder: str | None, *, joining: str | None = None
) -> tuple[Leadership, list[Command]]:
    """Begins another term, in which the leader alone holds the state."""
    holds = _put(_NOBODY, leader, holder)
    state = dataclasses.replace(
        state, term=state.term + 1, leader=leader, confirmed=False, joining=joining, holds=holds
    )
    return state, _lead(state)


def _lead(state: Leadership) -> list[Command]:
    incarnation = state.holds[state.leader]
    assert incarnation is not None  # a leader has the state
    backup, anew = state.joining, state.is_new_job
    return [Lead(copy=state.leader, incarnation=incarnation, term=state.term, backup=backup, anew=anew)]


def _put(pair: Pair, copy: int, value: str | None) -> Pair:
    return (value, pair[1]) if copy == 0 else (pair[0], value)
