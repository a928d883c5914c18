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
    """The coordinator's knowledge of a shard's copies; immutable.

    Attributes:
        term: the present leader's.
        leader: the copy that leads: 0 or 1.
        confirmed: whether it has confirmed that.
        joining: the incarnation of the other copy that it brings into step; None if it does not.
        holds: of each copy the incarnation that has all that was ever acknowledged; None if it does not.
        alive: of each copy the incarnation that answers; None while it is silent.
        is_new_job: whether the job brings its own state next, at its beginning and after `StateLost`: what the copies have
            does not matter.
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
        incarnation: its process; None if it has not answered for long.
        backup: the incarnation of the copy that it must bring into step under that term, or None.
        in_sync: the same, once it acknowledges nothing without it.
    """

    copy: int
    incarnation: str | None
    term: int = 0
    leads: bool = False
    backup: str | None = None
    in_sync: str | None = None


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
        new_job: whether it leads even with a part of an earlier leader's state only, as the job brings its own next.
    """

    copy: int
    incarnation: str
    term: int
    backup: str | None
    new_job: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Announce:
    """Command: tell everybody which copy leads, under which term."""

    copy: int
    term: int


@dataclasses.dataclass(frozen=True)
class StateLost:
    """Command: go back to the snapshot, as both copies have lost the state."""


Event = Heartbeat | LinkCut
Command = Lead | Announce | StateLost


def begin(*, term: int, alive: Pair) -> tuple[Leadership, list[Command]]:
    """Begins the first term, above all that any copy knows: copy 0 leads, or copy 1 if that alone is there."""
    leader = 0 if alive[0] is not None else 1
    holds = _put(_NOBODY, leader, alive[leader])
    state = Leadership(term=term, leader=leader, holds=holds, alive=alive, joining=alive[1 - leader], is_new_job=True)
    return state, _lead(state)


def handle(state: Leadership, event: Event) -> tuple[Leadership, list[Command]]:
    """Returns the knowledge after an event, and the commands."""
    if isinstance(event, LinkCut):
        if event.term != state.term:
            return state, []
        # Under another term the leader acknowledges alone, and begins to bring the other into step again.
        return _next_term(state, state.leader, state.holds[state.leader])
    incarnation = event.incarnation
    state = dataclasses.replace(state, alive=_put(state.alive, event.copy, incarnation))
    commands: list[Command] = []
    if incarnation is not None and event.copy == state.leader and incarnation == state.holds[state.leader]:
        if event.term < state.term:
            commands = _lead(state)  # it does not know yet that it leads
        elif event.term == state.term and event.leads and event.backup == (state.joining or state.holds[state.other]):
            if not state.confirmed:
                commands = [Announce(copy=state.leader, term=state.term)]
            state = dataclasses.replace(state, confirmed=True, is_new_job=False)
            if state.joining is not None and event.in_sync == state.joining:
                holds = _put(state.holds, state.other, event.in_sync)
                state = dataclasses.replace(state, joining=None, holds=holds)
        else:
            return _outbid(state, event)
    state, decision = _decide(state)
    return state, decision or commands  # a decision is about a higher term than the commands before it


def _decide(state: Leadership) -> tuple[Leadership, list[Command]]:
    """Begins another term, if what is known of the copies calls for one."""
    leader, other = state.leader, state.other
    holder, backup = state.holds[leader], state.holds[other]
    present, partner = state.alive[leader], state.alive[other]
    if present != holder:
        if backup is not None and partner == backup:
            return _next_term(state, other, backup)
        if present is not None and (backup is None or partner is not None):
            state, commands = _next_term(dataclasses.replace(state, is_new_job=True), leader, present)
            return state, [StateLost(), *commands]
        return state, []  # whichever copy has the state may only be slow
    expected = state.joining or backup
    if expected is not None and partner != expected:
        return _next_term(state, leader, holder)
    if backup is None and partner is not None and state.confirmed and state.joining is None:
        return _next_term(state, leader, holder, joining=partner)
    return state, []


def _outbid(state: Leadership, event: Heartbeat) -> tuple[Leadership, list[Command]]:
    """Begins a term above that in which another coordinator led this copy, and has begun no history since."""
    # Two coordinators may choose the same number; the backup tells them apart.
    # A copy that leads has kept its state. The other coordinator's leader may have overwritten one that does not.
    is_lost = not event.leads and not state.is_new_job
    state = dataclasses.replace(state, term=event.term, is_new_job=state.is_new_job or is_lost)
    state, commands = _next_term(state, state.leader, event.incarnation)
    return state, [StateLost(), *commands] if is_lost else commands


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
    is_new = state.is_new_job
    return [Lead(copy=state.leader, incarnation=incarnation, term=state.term, backup=state.joining, new_job=is_new)]


def _put(pair: Pair, copy: int, value: str | None) -> Pair:
    return (value, pair[1]) if copy == 0 else (pair[0], value)
