"""Process 0's knowledge of all processes, and its messages to them: pure functions of a state and an event.

No clock, socket or lock: `server` has these.

A process sends                             It receives
    hello   once, when it comes                 welcome     once all have come
                                                absent      not all came in time; all give up
    beat    every so often, with its step,      beat        every so often
            and since when it waits for others
    at      where it is: phase and stack        where       some have waited long: send where you are
                                                slow        to process 0 alone: who keeps the others waiting
    value   its part of an exchange             values      everyone's, once all have sent theirs
                                                void        one of them takes no part any more
    forget  leaves all exchanges with keys
            that begin with this
    wish    all shall stop                      stopping    someone wishes it: send the last step you passed
    passed  the last step it went on after      stop_at     the step after which all stop
    bye     its program has come to its end     left        that of another has; once all have, they part
    misses  waits for one that has left
    gone    it has parted, and hangs up
                                                lost        a process is gone or stands still: end
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jdist.cluster.watch.messages import Message

_LONG_S = 60.0  # a longer wait for a process is reported
_ASK_AGAIN_S = 10.0  # between two questions where all are
_MOST_REFUSED = 4  # connections that a message names
_MOST_OPEN = 100  # exchanges that only some have come to; a correct job has a few


class Outgoing(NamedTuple):
    """A message to one process, or to all (None)."""

    to: int | None
    message: Message


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process that has come."""

    address: str
    heard_s: float  # when it was last heard of
    step: int = 0  # the step in its last beat
    waits_s: float = 0.0  # how long it has waited for others at that step
    patience_s: float = math.inf  # how long that may be
    place: Message | None = None  # its phase and stack; None until it has answered the last "where"
    # the last step that it passed, sent once all are to stop; then it waits to hear when
    passed: int | None = None
    left: bool = False  # whether its program has come to its end
    gone: bool = False  # whether it has parted from the others


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The state of the job, as process 0 knows it."""

    count: int  # number of processes
    silence_s: float  # seconds of silence after which a process is lost
    start_by_s: float  # when all must have come
    awake_s: float  # when process 0 itself last ran
    members: Mapping[int, Member] = field(default_factory=dict)  # those that have come
    values: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)  # of each open exchange, by process
    # prefixes of keys, and the processes that have left such exchanges, until all have
    forgotten: Mapping[str, frozenset[int]] = field(default_factory=dict)
    stopping: str | None = None  # why all are to stop; None if nobody wishes it
    stop_at: int | None = None  # the step after which they stop; None until all have sent the last one they passed
    asked_s: float = -math.inf  # when all were last asked where they are
    told: tuple[int, int] | None = None  # the process, and its step, that was last reported to keep the others waiting
    lost: int | None = None  # the first process that was lost
    given_up: bool = False  # whether not all came in time
    refused: tuple[str, ...] = ()  # the connections that were refused, and why
    refusal_lasts: bool = False  # whether a restart would end the same: another number of processes, or other versions

    @property
    def absent(self) -> list[int]:
        """The processes that have not come."""
        return [i for i in range(self.count) if i not in self.members]


Transition = tuple[Membership, list[Outgoing]]


def refusal(state: Membership, hello: Message) -> str | None:
    """Finds why a process that sends a hello cannot take part, as a clause; None if it can."""
    process, count = hello.get("process"), hello.get("count")
    if count != state.count:
        return f"it was started as one of {count!r} processes, process 0 as one of {state.count}"
    if isinstance(process, bool) or not isinstance(process, int) or not 0 <= process < state.count:
        return f"process index {process!r} is not among 0 to {state.count - 1}"
    if process in state.members:
        return f"another process, at {state.members[process].address}, is process {process} already"
    if state.lost is not None:
        return f"process {state.lost} was lost, and the job ends"
    if state.given_up:
        return f"not all processes came, and the job ends{''.join(f'; {each}' for each in state.refused)}"
    return None


def give_up(state: Membership) -> Transition:
    """Ends the wait for the processes that have not come."""
    absent = {"processes": state.absent, "refused": list(state.refused), "lasts": state.refusal_lasts}
    return replace(state, given_up=True), [Outgoing(None, {"type": "absent", **absent})]


def note_refused(state: Membership, peer: str, why: str, *, lasts: bool = False) -> Membership:
    """Notes that a process was refused, as it may be one that the others wait for."""
    state = replace(state, refusal_lasts=state.refusal_lasts or lasts)
    text = f"one from {peer.rpartition(':')[0]} was refused: {why}"
    if text in state.refused or len(state.refused) >= _MOST_REFUSED:
        return state
    return replace(state, refused=(*state.refused, text))


def join(state: Membership, process: int, address: str, now_s: float) -> Transition:
    """Takes in a process after its hello was accepted."""
    members = {**state.members, process: Member(address=address, heard_s=now_s)}
    state = replace(state, members=members)
    if state.absent:
        return state, []
    addresses = [members[i].address for i in range(state.count)]
    outgoing = [Outgoing(None, {"type": "welcome", "addresses": addresses})]
    if state.stopping is not None:  # not all have heard of it
        outgoing.append(Outgoing(None, {"type": "stopping", "reason": state.stopping}))
    return state, outgoing


def receive(state: Membership, process: int, message: Message, now_s: float) -> Transition:
    """Takes in a message of a process; one that makes no sense is ignored."""
    member = replace(state.members[process], heard_s=now_s)
    match message:
        case {"type": "beat", "step": int(step), "waits_s": float(waits_s), "patience_s": float(patience_s)}:
            member = replace(member, step=step, waits_s=waits_s, patience_s=patience_s)
        case {"type": "at", "phase": str(), "may_last": bool(), "where": str(), "stack": list()}:
            return _judge(_with_member(state, process, replace(member, place=message)))
        case {"type": "value", "key": str(key), "value": value}:
            return _exchange(_with_member(state, process, member), process, key, value)
        case {"type": "forget", "prefix": str(prefix)}:
            who = state.forgotten.get(prefix, frozenset()) | {process}
            return _void(replace(_with_member(state, process, member), forgotten={**state.forgotten, prefix: who}))
        case {"type": "wish", "reason": str(reason)} if state.stopping is None:
            state = replace(_with_member(state, process, member), stopping=reason)
            return state, [Outgoing(None, {"type": "stopping", "reason": reason})]
        case {"type": "passed", "step": int(step)}:
            return _agree(_with_member(state, process, replace(member, passed=step)))
        case {"type": "bye"}:
            state, voids = _void(_with_member(state, process, replace(member, left=True)))
            return state, [Outgoing(None, {"type": "left", "process": process}), *voids]
        case {"type": "misses", "process": int(other)} if other in state.members:
            return _lose(
                _with_member(state, process, member),
                other,
                f"its program has ended, while process {process} waits for it",
            )
        case {"type": "gone"}:
            member = replace(member, left=True, gone=True)
    return _with_member(state, process, member), []


def disconnect(state: Membership, process: int) -> Transition:
    """Takes in the end of a connection: its process is lost, unless it has parted."""
    if state.members[process].gone:
        return state, []
    return _lose(state, process, "its connection broke: it was killed, or has crashed")


def wake(state: Membership, now_s: float) -> Transition:
    """Notes that process 0 runs; before any other event, as after a standstill all others seem silent."""
    still_s = now_s - state.awake_s
    state = replace(state, awake_s=now_s)
    if still_s > state.silence_s and 0 in state.members:
        return _lose(state, 0, f"it stood still for {still_s:.0f} s")
    return state, []


def tick(state: Membership, now_s: float) -> Transition:
    """Takes in the time, after all messages that have come by then."""
    for process, member in state.members.items():
        if not member.gone and now_s - member.heard_s > state.silence_s:
            still = "stands still" if process else "stood still"  # process 0 sees its own silence after it
            return _lose(state, process, f"nothing was heard of it for {state.silence_s:g} s: it {still}")
    if state.absent and now_s > state.start_by_s and not state.given_up:
        return give_up(state)
    outgoing = [Outgoing(None, {"type": "beat"})]
    is_long = any(each.waits_s > min(each.patience_s, _LONG_S) for each in state.members.values() if not each.left)
    if is_long and now_s - state.asked_s > _ASK_AGAIN_S:
        members = {i: replace(member, place=None) for i, member in state.members.items()}
        return replace(state, members=members, asked_s=now_s), [*outgoing, Outgoing(None, {"type": "where"})]
    return state, outgoing


def _with_member(state: Membership, process: int, member: Member) -> Membership:
    return replace(state, members={**state.members, process: member})


def _judge(state: Membership) -> Transition:
    """Reports or loses the process that keeps the others waiting, once all have sent where they are; not if work may last."""
    members = {i: member for i, member in state.members.items() if not member.left}
    places = {i: member.place for i, member in members.items() if member.place is not None}
    waited_s = max(member.waits_s for member in members.values())
    patience_s = min(member.patience_s for member in members.values())
    if len(places) < len(members) or waited_s <= min(_LONG_S, patience_s):
        return state, []
    if any(place["may_last"] for place in places.values()):
        return state, []
    behind = [i for i, member in members.items() if not member.waits_s]
    guilty = min(behind or members, key=lambda i: (members[i].step, i))
    where = f"{places[guilty]['phase']}, {places[guilty]['where']}"
    cause = f"the others have waited for it for {waited_s:.0f} s, and it is in {where}"
    if not behind:
        cause = f"all have waited for each other for {waited_s:.0f} s in a collective without end; it is at {where}"
    if not any(member.waits_s > member.patience_s for member in members.values()):
        if state.told == (guilty, members[guilty].step):
            return state, []
        told = guilty, members[guilty].step
        slow = {"type": "slow", "process": guilty, "step": told[1], "cause": cause, "patience_s": patience_s}
        return replace(state, told=told), [Outgoing(0, slow)]
    return _lose(state, guilty, cause, [{"process": i, "step": members[i].step, **places[i]} for i in sorted(places)])


def _lose(state: Membership, process: int, cause: str, places: Sequence[Message] = ()) -> Transition:
    if state.lost is not None or state.given_up:  # all end for that reason
        return state, []
    lost = {
        "type": "lost",
        "process": process,
        "address": state.members[process].address,
        "step": max(member.step for member in state.members.values()),
        "cause": cause,
        "places": list(places),
    }
    return replace(state, lost=process), [Outgoing(None, lost)]


def _exchange(state: Membership, process: int, key: str, value: Any) -> Transition:
    if key not in state.values and len(state.values) >= _MOST_OPEN:
        return state, []  # its callers run into their timeout
    by_process = {**state.values.get(key, {}), process: value}
    if len(by_process) < state.count:
        return _void(replace(state, values={**state.values, key: by_process}))
    rest = {k: v for k, v in state.values.items() if k != key}
    values = [by_process[i] for i in range(state.count)]
    return replace(state, values=rest), [Outgoing(None, {"type": "values", "key": key, "values": values})]


def _void(state: Membership) -> Transition:
    """Gives up exchanges that a process has left, and forgets prefixes that nobody needs."""
    # A prefix that only processes at their end have forgotten is not needed either: they have left
    # all exchanges.
    left = {i for i, member in state.members.items() if member.left}
    values, outgoing = {}, []
    for key, by_process in state.values.items():
        gone = left.union(*(who for prefix, who in state.forgotten.items() if key.startswith(prefix)))
        if gone:
            waiting = [i for i in by_process if gone != {i}]
            outgoing += [Outgoing(i, {"type": "void", "key": key, "process": min(gone - {i})}) for i in waiting]
        else:
            values[key] = by_process
    forgotten = {prefix: who for prefix, who in state.forgotten.items() if who - left and len(who | left) < state.count}
    return replace(state, values=values, forgotten=forgotten), outgoing


def _agree(state: Membership) -> Transition:
    """Decides, once all have sent the last step they passed, that all stop one step after the furthest."""
    passed = [member.passed for member in state.members.values() if member.passed is not None]
    if state.stop_at is not None or len(passed) < state.count:
        return state, []
    stop_at = max(passed) + 1
    return replace(state, stop_at=stop_at), [Outgoing(None, {"type": "stop_at", "step": stop_at})]
