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

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

Message = dict[str, Any]


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
    newcomers: tuple[int, ...]  # the ranks that have no state yet; rank 0 has it unless all are


@dataclass(frozen=True, kw_only=True)
class Job:
    """The state of a job."""

    least: int  # fewest processes of a world
    most: int
    silence_s: float  # after which a process is lost
    gather_s: float  # for processes to come, at the start and after a loss
    since_s: float  # when the gathering began
    world: World | None = None  # the newest
    runs: bool = False  # whether that one has not been left
    asked: bool = False  # whether its members were asked to leave
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
    """Takes in a process, whose name is new."""
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
    was_member = name in job.members
    job = replace(job, processes={other: each for other, each in job.processes.items() if other != name})
    if not well:
        job = replace(job, fenced=job.fenced | {name})
    if well and was_member:  # its program has ended, and so do the others': nobody is taken in any more
        return job, ([] if job.members else _end(job, "its program has come to its end")[1])
    if was_member and job.runs:
        job = replace(job, runs=False, since_s=now_s)
    return _decide(job, now_s)


def lost_in(job: Job, generation: int, rank: int, now_s: float) -> Transition:
    """Takes in that the members of a world have lost one of them."""
    if job.world is None or job.world.generation != generation:
        return job, []
    return gone(job, job.world.names[rank], now_s)


def tick(job: Job, now_s: float) -> Transition:
    """Takes in the time: processes that are silent, or do not come, are lost."""
    outgoing: list[Outgoing] = []
    for name, each in job.processes.items():
        if now_s - each.heard_s > job.silence_s:
            job, more = gone(job, name, now_s)
            outgoing += more
    if not job.runs and job.ended is None and now_s - job.since_s > job.gather_s:
        for name in job.members:
            if name in job.processes and not job.processes[name].ready:
                job, more = gone(job, name, now_s)
                outgoing += more
        if not job.runs and job.ended is None:
            job, more = _decide(job, now_s)
            outgoing += more
    return job, outgoing


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
    released = [name for name in members if job.processes[name].leaves]
    if members and released == list(members):
        return _end(job, "all processes were asked to leave")
    names = [name for name in members if name not in released]
    survivors, late = len(names), now_s - job.since_s > job.gather_s
    names = (names + job.waiting)[: job.most]
    if job.world is None and len(names) < job.most and not late:
        return job, []
    if len(names) < job.least or not names:
        return _end(job, f"{len(names)} of at least {job.least} processes are left") if late else (job, [])
    if job.world is not None and not survivors:
        return _end(job, "no process is left that has the state")
    steps = frozenset[int]()
    if survivors:
        steps = frozenset.intersection(*(job.processes[name].steps for name in names[:survivors]))
        if not steps:
            return _end(job, "the processes that are left have no step in common at which they could go on")
    world = World(
        generation=0 if job.world is None else job.world.generation + 1,
        names=tuple(names),
        step=max(steps, default=None),
        newcomers=tuple(range(survivors, len(names))),
    )
    outgoing = [Outgoing(name, {"type": "released"}) for name in released]
    for name in names:
        job = _changed(job, name, ready=False)
    processes = {name: each for name, each in job.processes.items() if name not in released}
    return replace(job, world=world, runs=True, asked=False, processes=processes), [
        *outgoing,
        *(Outgoing(name, {"type": "world"}) for name in names),  # the host adds the addresses
    ]


def _end(job: Job, reason: str) -> Transition:
    return replace(job, ended=reason), [Outgoing(name, {"type": "end", "reason": reason}) for name in job.processes]
