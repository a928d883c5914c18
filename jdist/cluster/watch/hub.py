"""What process 0 knows of all processes, and what it tells them: pure functions from a state and an event.

No clock, socket or lock: `watch.py` has these. Messages are dicts that JSON can hold, with a "type".

A process says                              It is told
    hello   once, when it comes                 welcome     once all have come
    beat    every so often, with its step       beat        in return
    value   its part of an exchange             values      everyone's, once all have said theirs
                                                void        one of them takes no part any more
    forget  takes no part in exchanges whose
            keys begin so, any more
    wish    that all stop                       stopping    someone wished it: say where you are, and wait
    ready   the last step it has passed         stop_at     the furthest of these: all stop at the next
    bye     its program has come to an end      left        the same of another
                                                lost        a process is gone: end
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

Message = dict[str, Any]


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
        left: whether its program has come to an end.
        ready: the last step that it has passed, while it waits to hear where to stop; else None.
    """

    address: str
    heard_s: float
    step: int = 0
    left: bool = False
    ready: int | None = None


@dataclass(frozen=True, kw_only=True)
class Hub:
    """The state.

    Attributes:
        count: how many processes there are.
        silence_s: a process that was not heard of for so long is lost.
        members: those that have come.
        values: what was said in each exchange that not all have taken part in yet.
        forgotten: beginnings of keys, and who takes no part in such exchanges any more; until nobody does.
        stopping: why all are to stop; None if nobody wishes it.
        lost: the process that was lost first; all ends with it.
    """

    count: int
    silence_s: float
    members: Mapping[int, Member] = field(default_factory=dict)
    values: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    forgotten: Mapping[str, frozenset[int]] = field(default_factory=dict)
    stopping: str | None = None
    lost: int | None = None


Next = tuple[Hub, list[Tell]]


def refusal(hub: Hub, hello: Message) -> str | None:
    """Why a process that says hello cannot take part, as a sentence; None if it can."""
    process, count = hello.get("process"), hello.get("count")
    if count != hub.count:
        return f"it was started as one of {count} processes, process 0 as one of {hub.count}"
    if isinstance(process, bool) or not isinstance(process, int) or not 0 <= process < hub.count:
        return f"process index {process!r} is not among 0 to {hub.count - 1}"
    if process in hub.members:
        return f"another process, at {hub.members[process].address}, is process {process} already"
    if hub.lost is not None:
        return f"process {hub.lost} was lost, and the job ends"
    return None


def joined(hub: Hub, process: int, address: str, now_s: float) -> Next:
    """A process has said a hello that is not refused."""
    members = {**hub.members, process: Member(address=address, heard_s=now_s)}
    hub = replace(hub, members=members)
    if len(members) < hub.count:
        return hub, []
    addresses = [members[i].address for i in range(hub.count)]
    return hub, [Tell(None, {"type": "welcome", "addresses": addresses})]


def heard(hub: Hub, process: int, message: Message, now_s: float) -> Next:
    """A process has said something; what makes no sense is passed over."""
    member = replace(hub.members[process], heard_s=now_s)
    match message:
        case {"type": "beat", "step": int(step)}:
            return _with(hub, process, replace(member, step=step)), [Tell(process, {"type": "beat"})]
        case {"type": "value", "key": str(key), "value": value}:
            return _exchanged(_with(hub, process, member), process, key, value)
        case {"type": "forget", "prefix": str(prefix)}:
            who = hub.forgotten.get(prefix, frozenset()) | {process}
            return _voided(replace(_with(hub, process, member), forgotten={**hub.forgotten, prefix: who}))
        case {"type": "wish", "reason": str(reason)}:
            hub = _with(hub, process, member)
            if hub.stopping is not None:
                return hub, []
            return replace(hub, stopping=reason), [Tell(None, {"type": "stopping", "reason": reason})]
        case {"type": "ready", "step": int(step)}:
            return _agreed(_with(hub, process, replace(member, ready=step, step=step)))
        case {"type": "bye"}:
            hub = _with(hub, process, replace(member, left=True))
            hub, voids = _voided(hub)
            hub, tells = _agreed(hub)
            return hub, [Tell(None, {"type": "left", "process": process, "address": member.address}), *voids, *tells]
    return _with(hub, process, member), []


def disconnected(hub: Hub, process: int) -> Next:
    """A process's connection has ended: it is gone, unless it said so before."""
    if hub.members[process].left:
        return hub, []
    return _lose(hub, process, "its connection broke: it was killed, or has crashed")


def ticked(hub: Hub, now_s: float) -> Next:
    """Time has passed."""
    for process, member in hub.members.items():
        if not member.left and now_s - member.heard_s > hub.silence_s:
            return _lose(hub, process, f"nothing was heard of it for {hub.silence_s:g} s: it stands still")
    return hub, []


def _with(hub: Hub, process: int, member: Member) -> Hub:
    return replace(hub, members={**hub.members, process: member})


def _lose(hub: Hub, process: int, cause: str) -> Next:
    if hub.lost is not None:
        return hub, []
    member = hub.members[process]
    lost = {
        "type": "lost",
        "process": process,
        "address": member.address,
        "step": max(m.step for m in hub.members.values()),
        "cause": cause,
    }
    return replace(hub, lost=process), [Tell(None, lost)]


def _exchanged(hub: Hub, process: int, key: str, value: Any) -> Next:
    said = {**hub.values.get(key, {}), process: value}
    if len(said) < hub.count:
        return _voided(replace(hub, values={**hub.values, key: said}))
    values = [said[i] for i in range(hub.count)]
    rest = {k: v for k, v in hub.values.items() if k != key}
    return replace(hub, values=rest), [Tell(None, {"type": "values", "key": key, "values": values})]


def _voided(hub: Hub) -> Next:
    """Gives up exchanges that one takes no part in any more, and beginnings that nobody uses any more."""
    left = {i for i, member in hub.members.items() if member.left}
    values, tells = {}, []
    for key, said in hub.values.items():
        gone = left.union(*(who for prefix, who in hub.forgotten.items() if key.startswith(prefix)))
        if gone:
            tells += [Tell(i, {"type": "void", "key": key, "process": min(gone - {i})}) for i in said if gone != {i}]
        else:
            values[key] = said
    forgotten = {prefix: who for prefix, who in hub.forgotten.items() if len(who | left) < hub.count}
    return replace(hub, values=values, forgotten=forgotten), tells


def _agreed(hub: Hub) -> Next:
    """All stop at the step behind the furthest that one of them has passed."""
    waiting = [member.ready for member in hub.members.values() if not member.left]
    steps = [step for step in waiting if step is not None]
    if hub.stopping is None or len(hub.members) < hub.count or not steps or len(steps) < len(waiting):
        return hub, []
    members = {i: replace(member, ready=None) for i, member in hub.members.items()}
    return replace(hub, members=members, stopping=None), [Tell(None, {"type": "stop_at", "step": max(steps)})]
