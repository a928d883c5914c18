"""What process 0 knows of all processes, and what it tells them: pure functions from a state and an event.

No clock, socket or lock: `switchboard.py` has these. Messages are dicts that JSON can hold, with a "type".

A process says                              It is told
    hello   once, when it comes                 welcome     once all have come
                                                absent      not all came in time; all give up
    beat    every so often, with its step,      beat        every so often
            and since when it waits for others
    at      where it is: phase and stack        where       some have waited for too long: say where you are
    value   its part of an exchange             values      everyone's, once all have said theirs
                                                void        one of them takes no part any more
    forget  takes no part in exchanges whose
            keys begin so, any more
    wish    that all stop                       stopping    someone wished it: say which step you passed last
    passed  the last step it went on after      stop_at     the step after which all stop
    bye     its program has come to an end      left        the same of another; once all have, they part
    misses  one that has left, as it waits for it
    gone    it has parted; its line ends
                                                lost        a process is gone or stands still: end
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

Message = dict[str, Any]

_ASK_AGAIN_S = 10.0  # after those who are waited for said that what they do may last
_MOST_REFUSED = 4  # that are told of
_MOST_OPEN = 100  # exchanges that some have said their part of and others have not; a correct job has a few


class Tell(NamedTuple):
    """A message to one process, or to all (None)."""

    to: int | None
    message: Message


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process that has come.

    Attributes:
        address: where it is.
        heard_s: when it was last heard of.
        step: the last step that it told of.
        waits_s, patience_s: how long it has waited for others at that step, and how long that may be.
        place: where it is, as far as it has said since all were asked.
        passed: the last step after which it went on, told once all are to stop; it goes past no other until it knows
            when to stop.
        left: whether its program has come to an end.
        gone: whether it has parted from the others.
    """

    address: str
    heard_s: float
    step: int = 0
    waits_s: float = 0.0
    patience_s: float = math.inf
    place: Message | None = None
    passed: int | None = None
    left: bool = False
    gone: bool = False


@dataclass(frozen=True, kw_only=True)
class Hub:
    """The state.

    Attributes:
        count: how many processes there are.
        silence_s: a process that was not heard of for so long is lost.
        start_by_s: by when all have to come.
        awake_s: when process 0 itself was last seen to run.
        members: those that have come.
        values: what was said in each exchange that not all have taken part in yet.
        forgotten: beginnings of keys, and who takes no part in such exchanges any more; until nobody does.
        stopping: why all are to stop; None if nobody wishes it.
        stop_at: the step after which they do; None until all have said which one they passed.
        asked_s: when all were asked where they are.
        lost: the process that was lost first; all ends with it.
        given_up: whether not all came in time.
        refused: who came and could not be taken in, and why, each once.
        misnumbered: whether one was started for a job of another size: no other start would end otherwise.
    """

    count: int
    silence_s: float
    start_by_s: float
    awake_s: float
    members: Mapping[int, Member] = field(default_factory=dict)
    values: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    forgotten: Mapping[str, frozenset[int]] = field(default_factory=dict)
    stopping: str | None = None
    stop_at: int | None = None
    asked_s: float = -math.inf
    lost: int | None = None
    given_up: bool = False
    refused: tuple[str, ...] = ()
    misnumbered: bool = False

    @property
    def absent(self) -> list[int]:
        """The processes that have not come."""
        return [i for i in range(self.count) if i not in self.members]


Next = tuple[Hub, list[Tell]]


def refusal(hub: Hub, hello: Message) -> str | None:
    """Why a process that says hello cannot take part, as a clause; None if it can."""
    process, count = hello.get("process"), hello.get("count")
    if count != hub.count:
        return f"it was started as one of {count!r} processes, process 0 as one of {hub.count}"
    if isinstance(process, bool) or not isinstance(process, int) or not 0 <= process < hub.count:
        return f"process index {process!r} is not among 0 to {hub.count - 1}"
    if process in hub.members:
        return f"another process, at {hub.members[process].address}, is process {process} already"
    if hub.lost is not None:
        return f"process {hub.lost} was lost, and the job ends"
    if hub.given_up:
        return "not all processes came in time, and the job ends"
    return None


def refused(hub: Hub, peer: str, why: str, *, misnumbered: bool = False) -> Hub:
    """A process was refused: it may be one that the others wait for."""
    hub = replace(hub, misnumbered=hub.misnumbered or misnumbered)
    told = f"one from {peer.rpartition(':')[0]} was refused: {why}"
    return (
        hub if told in hub.refused or len(hub.refused) >= _MOST_REFUSED else replace(hub, refused=(*hub.refused, told))
    )


def joined(hub: Hub, process: int, address: str, now_s: float) -> Next:
    """A process has said a hello that is not refused."""
    members = {**hub.members, process: Member(address=address, heard_s=now_s)}
    hub = replace(hub, members=members)
    if hub.absent:
        return hub, []
    addresses = [members[i].address for i in range(hub.count)]
    tells = [Tell(None, {"type": "welcome", "addresses": addresses})]
    if hub.stopping is not None:  # those that came later have not heard
        tells.append(Tell(None, {"type": "stopping", "reason": hub.stopping}))
    return hub, tells


def heard(hub: Hub, process: int, message: Message, now_s: float) -> Next:
    """A process has said something; what makes no sense is passed over."""
    member = replace(hub.members[process], heard_s=now_s)
    match message:
        case {"type": "beat", "step": int(step), "waits_s": float(waits_s), "patience_s": float(patience_s)}:
            member = replace(member, step=step, waits_s=waits_s, patience_s=patience_s)
        case {"type": "at", "phase": str(), "may_last": bool(), "where": str(), "stack": list()}:
            return _found(_with(hub, process, replace(member, place=message)))
        case {"type": "value", "key": str(key), "value": value}:
            return _exchanged(_with(hub, process, member), process, key, value)
        case {"type": "forget", "prefix": str(prefix)}:
            who = hub.forgotten.get(prefix, frozenset()) | {process}
            return _voided(replace(_with(hub, process, member), forgotten={**hub.forgotten, prefix: who}))
        case {"type": "wish", "reason": str(reason)} if hub.stopping is None:
            hub = replace(_with(hub, process, member), stopping=reason)
            return hub, [Tell(None, {"type": "stopping", "reason": reason})]
        case {"type": "passed", "step": int(step)}:
            return _agreed(_with(hub, process, replace(member, passed=step)))
        case {"type": "bye"}:
            hub, voids = _voided(_with(hub, process, replace(member, left=True)))
            return hub, [Tell(None, {"type": "left", "process": process}), *voids]
        case {"type": "misses", "process": int(other)} if other in hub.members:
            return _lose(
                _with(hub, process, member), other, f"its program has ended, while process {process} waits for it"
            )
        case {"type": "gone"}:
            member = replace(member, left=True, gone=True)
    return _with(hub, process, member), []


def disconnected(hub: Hub, process: int) -> Next:
    """A process's connection has ended: it is lost, unless it has parted."""
    if hub.members[process].gone:
        return hub, []
    return _lose(hub, process, "its connection broke: it was killed, or has crashed")


def awoke(hub: Hub, now_s: float) -> Next:
    """Process 0 runs; to be told before anything else, as after a standstill all others seem silent."""
    still_s = now_s - hub.awake_s
    hub = replace(hub, awake_s=now_s)
    if still_s > hub.silence_s and 0 in hub.members:
        return _lose(hub, 0, f"it stood still for {still_s:.0f} s")
    return hub, []


def ticked(hub: Hub, now_s: float) -> Next:
    """Time has passed; what had come by now was heard."""
    for process, member in hub.members.items():
        if not member.gone and now_s - member.heard_s > hub.silence_s:
            return _lose(hub, process, f"nothing was heard of it for {hub.silence_s:g} s: it stands still")
    if hub.absent and now_s > hub.start_by_s and not hub.given_up:
        return replace(hub, given_up=True), [
            Tell(
                None,
                {
                    "type": "absent",
                    "processes": hub.absent,
                    "refused": list(hub.refused),
                    "misnumbered": hub.misnumbered,
                },
            )
        ]
    tells = [Tell(None, {"type": "beat"})]
    too_long = any(member.waits_s > member.patience_s for member in hub.members.values() if not member.left)
    if too_long and now_s - hub.asked_s > _ASK_AGAIN_S:
        members = {i: replace(member, place=None) for i, member in hub.members.items()}
        return replace(hub, members=members, asked_s=now_s), [*tells, Tell(None, {"type": "where"})]
    return hub, tells


def _with(hub: Hub, process: int, member: Member) -> Hub:
    return replace(hub, members={**hub.members, process: member})


def _found(hub: Hub) -> Next:
    """Once all have said where they are: who is behind is lost, unless what it does may last."""
    members = {i: member for i, member in hub.members.items() if not member.left}
    places = {i: member.place for i, member in members.items() if member.place is not None}
    waited_s = max(member.waits_s for member in members.values())
    if len(places) < len(members) or not any(member.waits_s > member.patience_s for member in members.values()):
        return hub, []
    if any(place["may_last"] for place in places.values()):
        return hub, []
    behind = [i for i, member in members.items() if not member.waits_s]
    guilty = min(behind or members, key=lambda i: (members[i].step, i))
    where = f"{places[guilty]['phase']}, {places[guilty]['where']}"
    cause = f"the others have waited for it for {waited_s:.0f} s, and it is in {where}"
    if not behind:
        cause = f"all wait for each other since {waited_s:.0f} s, at a collective that does not end; it is at {where}"
    return _lose(hub, guilty, cause, [{"process": i, "step": members[i].step, **places[i]} for i in sorted(places)])


def _lose(hub: Hub, process: int, cause: str, places: Sequence[Message] = ()) -> Next:
    if hub.lost is not None or hub.given_up:  # all end for that reason
        return hub, []
    lost = {
        "type": "lost",
        "process": process,
        "address": hub.members[process].address,
        "step": max(member.step for member in hub.members.values()),
        "cause": cause,
        "places": list(places),
    }
    return replace(hub, lost=process), [Tell(None, lost)]


def _exchanged(hub: Hub, process: int, key: str, value: Any) -> Next:
    if key not in hub.values and len(hub.values) >= _MOST_OPEN:
        return hub, []  # whoever waits for it gives up in time
    said = {**hub.values.get(key, {}), process: value}
    if len(said) < hub.count:
        return _voided(replace(hub, values={**hub.values, key: said}))
    rest = {k: v for k, v in hub.values.items() if k != key}
    values = [said[i] for i in range(hub.count)]
    return replace(hub, values=rest), [Tell(None, {"type": "values", "key": key, "values": values})]


def _voided(hub: Hub) -> Next:
    """Gives up exchanges that one takes no part in any more, and beginnings that nobody uses any more.

    Nor need those be kept that only processes that have left take no part in: these take part in nothing.
    """
    left = {i for i, member in hub.members.items() if member.left}
    values, tells = {}, []
    for key, said in hub.values.items():
        gone = left.union(*(who for prefix, who in hub.forgotten.items() if key.startswith(prefix)))
        if gone:
            tells += [Tell(i, {"type": "void", "key": key, "process": min(gone - {i})}) for i in said if gone != {i}]
        else:
            values[key] = said
    forgotten = {prefix: who for prefix, who in hub.forgotten.items() if who - left and len(who | left) < hub.count}
    return replace(hub, values=values, forgotten=forgotten), tells


def _agreed(hub: Hub) -> Next:
    """All stop after the step that follows the furthest one that any of them has passed."""
    passed = [member.passed for member in hub.members.values()]
    said = [step for step in passed if step is not None]
    if hub.stop_at is not None or len(said) < hub.count:
        return hub, []
    stop_at = max(said) + 1
    return replace(hub, stop_at=stop_at), [Tell(None, {"type": "stop_at", "step": stop_at})]
