"""Decides which processes are in which world: pure functions of a job's state and an event.

    GATHERING ── enough are ready ──> RUNNING ── a member is lost ──────────────────> GATHERING
        │                                ├── others are ready and there is room ────> (asks the members to leave)
        │                                └── the members leave at one step ─────────> GATHERING
        └── too few come, or all members leave for good ──> ENDED

A process sends                                     It receives
    hello   once: its name and number                   aside    the job runs already, or is full: say ready later
    ready   it has left a world, and can go on at        world    it is in this world, with this number
            one of these steps                          regroup  leave at the next step: others wait to come in
    beat    every so often                              released it leaves for good, and the others go on
    bye     its program has come to its end             end      the job is over, and why
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

Message = dict[str, Any]
FINISHED = "the job has come to its end without this process"


class Outgoing(NamedTuple):
    """A message to one process."""

    to: str
    message: Message


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process that is connected."""

    number: int  # its place in the order in which processes were started
    address: str
    heard_s: float
    ready: bool = False
    steps: frozenset[int] = frozenset()  # it can go on at
    leaves: bool = False  # for good


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes that run JAX together, by rank."""

    generation: int
    names: tuple[str, ...]
    step: int | None  # at which all go on; None: at the beginning
    newcomers: tuple[int, ...]  # the ranks that have no state yet


@dataclass(frozen=True, kw_only=True)
class Job:
    """The state of a job."""

    least: int  # fewest processes of a world
    most: int
    silence_s: float  # after which a process is lost
    gather_s: float  # for processes to come, at the start and after a loss
    since_s: float  # when the gathering began
    ticked_s: float = math.inf  # when the time was last taken in
    world: World | None = None  # the newest
    runs: bool = False  # whether that one has not been left
    asked: bool = False  # whether its members were asked to leave
    has_begun: bool = False  # whether a world went on from another one's state
    processes: Mapping[str, Process] = field(default_factory=dict)  # by name
    fenced: frozenset[str] = frozenset()  # lost, and may not come back under that name
    ended: str | None = None  # why the job is over

    @property
    def members(self) -> tuple[str, ...]:
        """The members of the newest world that are connected, by rank."""
        return () if self.world is None else tuple(name for name in self.world.names if name in self.processes)

    @property
    def waiting(self) -> list[str]:
        """The processes that wait to come into a world, in the order of their numbers."""
        names = [name for name, each in self.processes.items() if each.ready and name not in self.members]
        return sorted(names, key=lambda name: (self.processes[name].number, name))


Transition = tuple[Job, list[Outgoing]]


def hello(job: Job, name: str, number: int, address: str, now_s: float) -> Transition:
    """Takes in a process of a new name."""
    processes = {**job.processes, name: Process(number=number, address=address, heard_s=now_s)}
    job = replace(job, processes=processes)
    if job.ended is not None:
        return job, [Outgoing(name, {"type": "end", "reason": job.ended})]
    aside = job.world is not None or number >= job.most
    return job, [Outgoing(name, {"type": "aside" if aside else "welcome"})]


def ready(
    job: Job, name: str, *, generation: int, steps: frozenset[int], leaves: bool = False, now_s: float
) -> Transition:
    """Takes in that a process has left the world of `generation` (-1: none), and waits for the next."""
    if name in job.members and job.world is not None and generation != job.world.generation:
        return job, []  # of an earlier world: it has not seen the newest one yet
    job = _changed(job, name, ready=True, steps=steps, leaves=leaves, heard_s=now_s)
    if name in job.members and job.runs:
        job = replace(job, runs=False, since_s=now_s)
    return _decide(job, now_s)


def heard(job: Job, name: str, now_s: float) -> Job:
    """Notes that a process is there."""
    return _changed(job, name, heard_s=now_s) if name in job.processes else job


def gone(job: Job, name: str, now_s: float, *, well: bool = False) -> Transition:
    """Takes in the end of a process; `well`: its program has come to its end."""
    if name not in job.processes:
        return job, []
    if not well:
        return _decide(_without(job, [name], now_s), now_s)
    was_member = name in job.members
    job = replace(job, processes={other: each for other, each in job.processes.items() if other != name})
    return _end(job, FINISHED) if was_member and not job.members else (job, [])


def lost_in(job: Job, generation: int, rank: int, now_s: float) -> Transition:
    """Takes in that the members of a world have lost one of them."""
    if job.world is None or job.world.generation != generation:
        return job, []
    return gone(job, job.world.names[rank], now_s)


def tick(job: Job, now_s: float) -> Transition:
    """Takes in the time: processes that are silent, or do not come, are lost."""
    if now_s - job.ticked_s > job.silence_s / 2:  # the host stood still: all seem silent
        processes = {name: replace(each, heard_s=now_s) for name, each in job.processes.items()}
        job = replace(job, processes=processes)
    job = replace(job, ticked_s=now_s)
    late = not job.runs and now_s - job.since_s > job.gather_s
    lost = [
        name
        for name, each in job.processes.items()
        if now_s - each.heard_s > job.silence_s or (late and name in job.members and not each.ready)
    ]
    return _decide(_without(job, lost, now_s), now_s) if lost or late else (job, [])


def _without(job: Job, names: Collection[str], now_s: float) -> Job:
    """Takes lost processes out; their world is left, if one was a member."""
    is_broken = job.runs and not set(names).isdisjoint(job.members)
    processes = {name: each for name, each in job.processes.items() if name not in names}
    job = replace(job, processes=processes, fenced=job.fenced.union(names))
    return replace(job, runs=False, since_s=now_s) if is_broken else job


def _changed(job: Job, name: str, **changes: Any) -> Job:
    return replace(job, processes={**job.processes, name: replace(job.processes[name], **changes)})


def _decide(job: Job, now_s: float) -> Transition:
    """Makes the next world if all that it needs are there."""
    if job.ended is not None:
        return job, []
    if job.runs:
        assert job.world is not None
        if job.asked or not job.waiting or len(job.members) >= job.most:
            return job, []
        return replace(job, asked=True), [Outgoing(name, {"type": "regroup"}) for name in job.members]
    members = job.members
    if not all(job.processes[name].ready for name in members):
        return job, []
    # As long as others have the state: else one that was asked to leave hands it on first, or saves it.
    released = [name for name in members if job.processes[name].leaves]
    if not any(job.processes[name].steps for name in members if name not in released):
        released = []
    survivors = [name for name in members if name not in released]
    names, late = _ranked(job, survivors), now_s - job.since_s > job.gather_s
    if job.world is None and len(names) < job.most and not late:
        return job, []
    holders = [name for name in survivors if job.processes[name].steps]  # others came in, and have not got it yet
    if job.world is not None and not holders and (job.has_begun or not survivors):
        return _end(job, "no process is left that has the state")
    if len(names) < job.least or not names:
        return _end(job, f"{len(names)} of at least {job.least} processes are left") if late else (job, [])
    steps = frozenset[int]()
    if holders:
        steps = frozenset.intersection(*(job.processes[name].steps for name in holders))
        if not steps:
            return _end(job, "the processes that are left have no step in common at which they could go on")
    world = World(
        generation=0 if job.world is None else job.world.generation + 1,
        names=tuple(names),
        step=max(steps, default=None),
        newcomers=tuple(rank for rank, name in enumerate(names) if name not in holders),
    )
    outgoing = [Outgoing(name, {"type": "released"}) for name in released]
    for name in names:
        job = _changed(job, name, ready=False)
    processes = {name: each for name, each in job.processes.items() if name not in released}
    job = replace(job, has_begun=bool(holders), world=world, runs=True, asked=False, processes=processes)
    return job, [
        *outgoing,
        *(Outgoing(name, {"type": "world"}) for name in names),  # the host adds the addresses
    ]


def _ranked(job: Job, survivors: Collection[str]) -> list[str]:
    """Orders the processes of the next world: those that come in take the ranks of the lost, so that sums keep their order."""
    waiting, before = iter(job.waiting), () if job.world is None else job.world.names
    names = [name if name in survivors else next(waiting, None) for name in before]
    return [*(name for name in names if name is not None), *waiting][: job.most]


def _end(job: Job, reason: str) -> Transition:
    return replace(job, ended=reason), [Outgoing(name, {"type": "end", "reason": reason}) for name in job.processes]
