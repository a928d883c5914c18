"""Random orders of events: each world has one copy of the state, and no order leaves a job standing still."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from jdist.cluster.worlds import generations
from jdist.cluster.worlds.generations import Job

SILENCE_S, GATHER_S = 5.0, 30.0


@dataclass
class Child:
    """A process as the job's host sees it, which answers late, or never again."""

    number: int
    generation: int = -1
    steps: frozenset[int] = frozenset()
    leaves: bool = False
    is_silent: bool = False
    must_answer: bool = True  # it has left its world, or has come


@dataclass
class Simulation:
    """A host and its processes; `draw` decides what happens next."""

    draw: random.Random
    job: Job
    now_s: float = 0.0
    step: int = 0
    children: dict[str, Child] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def start(self, number: int) -> None:
        name = f"{number}-{len(self.seen)}-{self.draw.random()}"
        self.children[name] = Child(number)
        self.take(generations.hello(self.job, name, number, f"host:{number}", self.now_s))

    def take(self, transition: generations.Transition) -> None:
        before, (self.job, outgoing) = self.job, transition
        world = self.job.world
        if world is not None and world is not before.world:
            self.check(before)
            self.step = self.step if world.step is None else world.step
        if before.runs and not self.job.runs:  # the watch tells all that it is over
            for name in self.job.members:
                self.children[name].must_answer = True
        for to, message in outgoing:
            child = self.children.get(to)
            if child is None:
                continue
            match message["type"]:
                case "world":
                    child.generation, child.must_answer = world.generation, False
                    child.steps = frozenset({self.step})
                case "regroup":
                    child.must_answer = True
                case "released" | "end":
                    del self.children[to]
        for name in set(self.children) - set(self.job.processes):
            del self.children[name]

    def check(self, before: Job) -> None:
        world = self.job.world
        assert world.generation == (0 if before.world is None else before.world.generation + 1)
        assert before.least <= len(world.names) <= before.most
        assert len(set(world.names)) == len(world.names)
        assert not set(world.names) & self.job.fenced
        old = [name for name in world.names if before.world is not None and name in before.world.names]
        assert world.newcomers == tuple(i for i, name in enumerate(world.names) if name not in old)
        if before.world is not None:
            assert old == [name for name in before.world.names if name in old]
            if len(world.names) == len(before.world.names):  # sums keep their order
                assert [name for name in world.names if name in old] == old
                assert all(world.names.index(name) == before.world.names.index(name) for name in old)
            assert old, "a world without a copy of the state"
            assert all(world.step in self.job.processes[name].steps for name in old)
        self.seen["worlds"] += 1

    def event(self) -> None:
        self.now_s += self.draw.choice([0.0, 0.1, 1.0])
        names = sorted(self.children)
        kind = self.draw.choices(
            ["answer", "step", "kill", "stop", "start", "leave", "tick"], [40, 20, 4, 2, 6, 2, 26]
        )[0]
        self.seen[kind] += 1
        match kind:
            case "answer":
                self.answer([name for name in names if self.children[name].must_answer])
            case "step" if self.job.runs and not any(
                c.must_answer for c in self.children.values() if c.generation >= 0
            ):
                # Of two copies the older one is everybody's.
                self.step += 1
                for name in self.job.members:
                    self.children[name].steps = frozenset({self.step - 1, self.step})
            case "kill" if names:
                name = self.draw.choice(names)
                del self.children[name]
                self.take(generations.gone(self.job, name, self.now_s))
            case "stop" if names:
                self.children[self.draw.choice(names)].is_silent = True
            case "start":
                self.start(self.draw.randrange(8))
            case "leave" if names and len(names) > 2:
                self.children[self.draw.choice(names)].leaves = True
            case "tick":
                self.tick()

    def answer(self, names: list[str]) -> None:
        names = [name for name in names if not self.children[name].is_silent]
        if names:
            name = self.draw.choice(names)
            child = self.children[name]
            child.must_answer = False
            self.take(
                generations.ready(
                    self.job,
                    name,
                    generation=child.generation,
                    steps=child.steps,
                    leaves=child.leaves and child.generation >= 0,
                    now_s=self.now_s,
                )
            )

    def tick(self) -> None:
        for name, child in self.children.items():
            if not child.is_silent:
                self.job = generations.heard(self.job, name, self.now_s)
        self.take(generations.tick(self.job, self.now_s))

    def settle(self) -> None:
        """Lets all that can answer do so, and time pass."""
        for _ in range(200):
            self.now_s += 1.0
            self.tick()
            waiting = [name for name, child in self.children.items() if child.must_answer and not child.is_silent]
            self.answer(waiting)


@pytest.mark.parametrize("seed", range(300))
def test_no_order_of_events_leaves_a_job_standing_still_or_without_its_state(seed):
    draw = random.Random(seed)
    most = draw.randrange(1, 6)
    job = Job(least=draw.randrange(1, most + 1), most=most, silence_s=SILENCE_S, gather_s=GATHER_S, since_s=0.0)
    simulation = Simulation(draw, job)
    for number in range(most):
        simulation.start(number)
    for _ in range(120):
        simulation.event()
    simulation.settle()
    job = simulation.job
    assert job.ended is not None or (job.runs and job.members) or not job.processes
    if job.runs and job.ended is None:
        assert len(job.members) == job.most or not job.waiting


def test_the_events_are_frequent_enough_to_mean_something():
    seen = Counter()
    for seed in range(50):
        draw = random.Random(seed)
        simulation = Simulation(draw, Job(least=1, most=4, silence_s=5.0, gather_s=30.0, since_s=0.0))
        for number in range(4):
            simulation.start(number)
        for _ in range(120):
            simulation.event()
        seen += simulation.seen
    assert seen["worlds"] > 100
    assert seen["kill"] > 100
