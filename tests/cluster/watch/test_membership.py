import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.cluster.watch import membership
from jdist.cluster.watch.membership import Membership, Outgoing

SILENCE_S = 10.0


def empty(count=2):
    return Membership(count=count, silence_s=SILENCE_S, start_by_s=60.0, awake_s=0.0)


def full(count=2):
    """A hub that all have joined at time 0."""
    hub = empty(count)
    for process in range(count):
        hub, _ = membership.join(hub, process, f"n{process}:1", 0.0)
    return hub


def after(hub, *said, now_s=1.0):
    """The hub, and all that it told, after messages as (process, message)."""
    told = []
    for process, message in said:
        hub, tells = membership.receive(hub, process, message, now_s)
        told += tells
    return hub, told


def beat(step, waits_s=0.0, patience_s=60.0):
    return {"type": "beat", "step": step, "waits_s": waits_s, "patience_s": patience_s}


def at(phase="its own code", *, may_last=False, stack=("loader.py:3 read",)):
    return {"type": "at", "phase": phase, "may_last": may_last, "where": stack[-1], "stack": list(stack)}


def hello(process, count=2):
    return {"type": "hello", "process": process, "count": count}


# ---- coming together


def test_all_are_welcome_once_the_last_has_come():
    hub, tells = membership.join(empty(), 1, "n1:1", 0.0)
    assert tells == []
    assert membership.join(hub, 0, "n0:1", 0.0)[1] == [
        Outgoing(None, {"type": "welcome", "addresses": ["n0:1", "n1:1"]})
    ]


@pytest.mark.parametrize(
    ("hub", "said", "why"),
    [
        (empty(), hello(1, count=3), "it was started as one of 3 processes, process 0 as one of 2"),
        (empty(), hello(1, count="2"), "it was started as one of '2' processes"),
        (empty(), hello(2), "process index 2 is not among 0 to 1"),
        (empty(), hello(-1), "process index -1"),
        (empty(), hello(True), "process index True"),
        (empty(), hello("1"), "process index '1'"),
        (empty(), hello(None), "process index None"),
        (full(), hello(1), "another process, at n1:1, is process 1 already"),
        (membership.disconnect(membership.join(empty(), 1, "n1:1", 0.0)[0], 1)[0], hello(0), "process 1 was lost"),
        (membership.tick(empty(), 61.0)[0], hello(0), "not all processes came, and the job ends"),
    ],
)
def test_who_does_not_fit_in_is_told_why(hub, said, why):
    assert membership.refusal(hub, said).startswith(why)


def test_who_fits_in_is_not_refused():
    assert membership.refusal(empty(), hello(1)) is None


def test_those_that_did_not_come_in_time_are_named_once():
    hub, _ = membership.join(empty(3), 1, "n1:1", 55.0)
    hub, tells = membership.tick(hub, 60.5)
    (tell,) = tells
    assert (tell.to, tell.message["type"], tell.message["processes"]) == (None, "absent", [0, 2])
    assert (tell.message["refused"], tell.message["lasts"]) == ([], False)
    assert [tell.message["type"] for tell in membership.tick(hub, 61.0)[1]] == ["beat"]
    assert membership.disconnect(hub, 1) == (hub, [])  # it gave up, and is no loss


# ---- losses


def test_a_broken_connection_is_a_loss_told_once():
    hub, _ = after(full(), (0, beat(7)))
    hub, tells = membership.disconnect(hub, 1)
    cause = "its connection broke: it was killed, or has crashed"
    assert tells == [
        Outgoing(None, {"type": "lost", "process": 1, "address": "n1:1", "step": 7, "cause": cause, "places": []})
    ]
    assert membership.disconnect(hub, 0)[1] == []


def test_silence_is_a_loss():
    hub, _ = after(full(), (0, beat(1)), now_s=5.0)
    assert membership.tick(hub, SILENCE_S)[1] == [Outgoing(None, {"type": "beat"})]
    (tell,) = membership.tick(hub, SILENCE_S + 0.1)[1]
    assert (tell.message["process"], tell.message["cause"]) == (1, "nothing was heard of it for 10 s: it stands still")


def test_who_comes_early_must_be_heard_of_before_all_have_come():
    hub, _ = membership.join(empty(), 1, "n1:1", 0.0)
    assert membership.tick(hub, SILENCE_S + 0.1)[0].lost == 1


def test_a_standstill_of_process_0_is_its_own():
    hub, tells = membership.wake(full(), SILENCE_S + 5)
    assert (tells[0].message["process"], tells[0].message["cause"]) == (0, "it stood still for 15 s")
    assert membership.tick(hub, SILENCE_S + 5)[1] == []


def test_a_standstill_just_short_of_the_limit_that_began_after_a_silence_is_its_own():
    hub, _ = membership.wake(after(full(), (1, beat(1)), now_s=5.0)[0], 2.0)
    hub, tells = membership.wake(hub, SILENCE_S + 1.0)
    assert tells == []
    (tell,) = membership.tick(hub, SILENCE_S + 1.0)[1]
    assert (tell.message["process"], tell.message["cause"]) == (0, "nothing was heard of it for 10 s: it stood still")


def test_process_0_that_runs_is_not_lost():
    hub = full()
    for now_s in range(1, 30):
        hub, tells = membership.wake(hub, float(now_s))
        assert tells == []


def test_after_its_end_a_process_is_watched_until_it_has_parted():
    hub, _ = after(full(), (1, {"type": "bye"}))
    assert membership.disconnect(hub, 1)[0].lost == 1
    hub, _ = after(hub, (1, {"type": "gone"}), (0, beat(1)), now_s=50.0)
    assert membership.disconnect(hub, 1) == (hub, [])
    assert membership.tick(hub, 50.0 + SILENCE_S)[0].lost is None


def test_who_is_missed_after_its_end_is_lost():
    (tell,) = after(full(), (1, {"type": "bye"}), (0, {"type": "misses", "process": 1}))[1][1:]
    assert (tell.to, tell.message["process"]) == (None, 1)
    assert tell.message["cause"] == "its program has ended, while process 0 waits for it"


# ---- exchanges


def test_exchanges_that_nobody_answers_do_not_fill_the_memory():
    hub, _ = after(full(), *((1, {"type": "value", "key": str(i), "value": 0}) for i in range(1000)))
    assert len(hub.values) == 100


@pytest.mark.parametrize(
    "message",
    [
        {"type": "hello", "process": 0, "count": 2},
        {"type": "beat"},
        {"type": "beat", "step": "7"},
        {"type": "value", "key": 1, "value": 2},
        {"type": "value", "key": "k"},
        {"type": "wish"},
        {"type": "wish", "reason": None},
        {"type": "passed", "step": None},
        {"type": "lost", "process": 0},
        {"type": "misses", "process": 7},
        {"type": "no such"},
    ],
)
def test_what_makes_no_sense_changes_nothing_but_was_heard(message):
    before = full()
    hub, told = after(before, (1, message))
    assert told == []
    assert hub.members[1].heard_s == 1.0
    assert (hub.members[0], hub.values, hub.stopping) == (before.members[0], {}, None)


# ---- all interleavings of what a few processes do: a model of `Watch` and of the network


class Process:
    """A process that takes steps with the others, as `Watch` lets it."""

    def __init__(self, steps):
        self.steps = steps
        self.step = self.passed = 0  # taken; gone past
        self.stopping = self.stop_at = self.ended = None
        self.heard, self.said = [], [hello(0)]

    def hears(self, message):
        self.heard.append(message["type"])
        if message["type"] == "stopping" and self.stopping is None:
            self.stopping = True
            self.said.append({"type": "passed", "step": self.passed})
        if message["type"] == "stop_at":
            assert message["step"] > self.passed
            self.stop_at = message["step"]
        if message["type"] == "lost":
            self.ended = "lost"

    def asks(self):
        """After a step: stops, goes on, or waits to know when to stop."""
        if self.step == self.steps:
            self.ended = "finished"
        elif self.stopping is None or (self.stop_at is not None and self.step < self.stop_at):
            self.passed = self.step
        elif self.stop_at is not None:
            self.ended = "stopped"


class World:
    def __init__(self, count, steps):
        self.hub = empty(count)
        self.processes = [Process(steps) for _ in range(count)]
        self.to = [[] for _ in range(count)]  # the hub's messages on their way
        self.connected = set()
        self.killed = set()

    def tell(self, following):
        self.hub, tells = following
        for to, message in tells:
            for process in sorted(self.connected) if to is None else [to]:
                self.to[process].append(message)

    def events(self):
        """What can happen now, each a function."""
        found = []
        for i, process in enumerate(self.processes):
            if i in self.killed:
                if i in self.connected:
                    found.append(lambda i=i: self.breaks(i))
                continue
            if process.said:
                found.append(lambda i=i: self.delivers(i))
            if self.to[i]:
                found.append(lambda i=i: self.processes[i].hears(self.to[i].pop(0)))
            if process.ended is None and "welcome" in process.heard:
                if process.step == process.passed:
                    # A collective: it ends once all have come to it.
                    if all(other.passed >= process.passed for other in self.processes) and not self.killed:
                        found.append(lambda p=process: setattr(p, "step", p.step + 1))
                elif process.stopping is None or process.stop_at is not None or process.step == process.steps:
                    found.append(process.asks)
        return found

    def delivers(self, i):
        message = self.processes[i].said.pop(0)
        if message["type"] == "hello":
            if membership.refusal(self.hub, message | {"process": i, "count": self.hub.count}) is not None:
                self.processes[i].ended = "refused"
                return
            self.connected.add(i)
            self.tell(membership.join(self.hub, i, f"n{i}:1", 0.0))
        elif i in self.connected:
            self.tell(membership.receive(self.hub, i, message, 0.0))

    def breaks(self, i):
        self.connected.remove(i)
        self.tell(membership.disconnect(self.hub, i))

    def go(self, choices):
        """Events in the order that the choices say."""
        for choice in choices:
            if events := self.events():
                events[choice % len(events)]()

    def settle(self, choices):
        """As `go`, then until nothing can happen any more."""
        self.go(choices)
        while events := self.events():
            events[0]()


CHOICES = st.lists(st.integers(0, 11), max_size=60)


@settings(deadline=None)
@given(st.integers(2, 4), CHOICES, CHOICES)
def test_all_are_welcome_once_and_finish(count, first, then):
    world = World(count, steps=3)
    world.settle([*first, *then])
    for process in world.processes:
        assert process.heard.count("welcome") == 1
        assert process.ended == "finished"


@settings(deadline=None, max_examples=300)
@given(st.integers(2, 3), CHOICES, st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), min_size=1, max_size=3))
def test_who_wishes_it_all_stop_after_the_same_step_and_none_waits_for_ever(count, choices, wishes):
    world = World(count, steps=6)
    for process, at in wishes:
        world.go(choices[:at])
        world.processes[process % count].said.append({"type": "wish", "reason": "SIGTERM"})
    world.settle(choices)
    assert len({(process.ended, process.step) for process in world.processes}) == 1
    assert world.processes[0].ended in ("stopped", "finished")
    for process in world.processes:
        assert process.heard.count("stopping") <= 2
        assert process.heard.count("stop_at") == 1


@settings(deadline=None)
@given(st.integers(2, 4), CHOICES, st.integers(0, 3), st.booleans(), CHOICES)
def test_once_a_process_is_lost_all_others_hear_of_it_once(count, first, victim, wished, then):
    world = World(count, steps=4)
    victim %= count
    world.go(first)
    if wished:
        world.processes[-1].said.append({"type": "wish", "reason": "SIGTERM"})
    world.killed.add(victim)
    came = victim in world.connected
    world.settle(then)
    for i, process in enumerate(world.processes):
        if i != victim and came:
            assert process.ended == "refused" or process.heard.count("lost") == 1
            assert process.ended is not None


@settings(deadline=None)
@given(st.integers(2, 4), st.data())
def test_each_exchange_reaches_all_once_whatever_the_order(count, data):
    hub, told = full(count), []
    left = {i: [("a", i), ("b", -i), ("c", [i])] for i in range(count)}
    while any(left.values()):
        i = data.draw(st.sampled_from([i for i in left if left[i]]))
        key, value = left[i].pop(0)
        hub, tells = membership.receive(hub, i, {"type": "value", "key": key, "value": value}, 0.0)
        told += tells
    values = {tell.message["key"]: tell.message["values"] for tell in told}
    assert len(told) == 3
    assert values == {
        "a": list(range(count)),
        "b": [-i for i in range(count)],
        "c": [[i] for i in range(count)],
    }
    assert hub.values == {}


def test_who_waits_in_vain_hears_of_those_that_were_refused():
    hub = Membership(count=2, silence_s=10, start_by_s=5.0, awake_s=0.0)
    hub, _ = membership.join(hub, 0, "n0:1", 0.0)
    for port in (1, 2):  # it tries again and again
        hub = membership.note_refused(hub, f"10.0.0.2:{port}", "its JDIST_TOKEN is not that of process 0")
    _, (told,) = membership.tick(hub, 6.0)
    assert told.message["refused"] == ["one from 10.0.0.2 was refused: its JDIST_TOKEN is not that of process 0"]
    assert not told.message["lasts"]


# ---- alive, and stuck


def asked(*beats):
    """A hub in which all were asked where they are, as one has waited for too long."""
    hub, _ = after(full(len(beats)), *enumerate(beats), now_s=5.0)
    hub, tells = membership.tick(hub, 6.0)
    assert Outgoing(None, {"type": "where"}) in tells
    return hub


def test_who_keeps_the_others_waiting_for_too_long_is_lost_and_it_is_said_where_all_are():
    hub = asked(beat(8, waits_s=61.0), beat(7), beat(8, waits_s=20.0))
    assert [tell.message["type"] for tell in membership.tick(hub, 7.0)[1]] == ["beat"]  # once
    waiting = at("waiting for the others", stack=["step.py:9 call"])
    hub, told = after(hub, (0, waiting), (1, at()))
    assert told == []
    hub, (told,) = after(hub, (2, waiting))
    assert (told.message["process"], told.message["address"]) == (1, "n1:1")
    assert (
        told.message["cause"] == "the others have waited for it for 61 s, and it is in its own code, loader.py:3 read"
    )
    assert [(p["process"], p["step"], p["phase"]) for p in told.message["places"]] == [
        (0, 8, "waiting for the others"),
        (1, 7, "its own code"),
        (2, 8, "waiting for the others"),
    ]


def test_a_collective_that_never_ends_is_told_by_the_process_at_the_lowest_step():
    hub = asked(beat(8, waits_s=61.0), beat(7, waits_s=61.0))
    _, (told,) = after(hub, (0, at()), (1, at()))
    assert told.message["process"] == 1
    assert told.message["cause"].startswith("all have waited for each other for 61 s in a collective without end")


def test_what_may_last_is_waited_for_and_asked_again():
    hub = asked(beat(8, waits_s=61.0), beat(7))
    hub, told = after(hub, (0, at()), (1, at("compiling", may_last=True)))
    assert told == []
    hub, _ = after(hub, (0, beat(8, waits_s=72.0)), (1, beat(7)), now_s=17.0)
    hub, tells = membership.tick(hub, 17.0)
    assert Outgoing(None, {"type": "where"}) in tells
    hub, (told,) = after(hub, (0, at()), (1, at()))
    assert told.message["process"] == 1


def test_a_long_wait_is_reported_once_a_step_before_it_ends_the_job():
    hub = asked(beat(8, waits_s=61.0, patience_s=300.0), beat(7, patience_s=400.0))
    hub, told = after(hub, (0, at()), (1, at()))
    cause = "the others have waited for it for 61 s, and it is in its own code, loader.py:3 read"
    slow = {"type": "slow", "process": 1, "step": 7, "cause": cause, "patience_s": 300.0}
    assert told == [Outgoing(0, slow)]
    for waits_s, now_s, expected in ((299.0, 20.0, []), (301.0, 40.0, ["lost"])):
        hub, _ = after(hub, (0, beat(8, waits_s=waits_s, patience_s=300.0)), (1, beat(7)), now_s=now_s)
        hub, _ = membership.tick(hub, now_s)
        hub, told = after(hub, (0, at()), (1, at()))
        assert [tell.message["type"] for tell in told] == expected


def test_nobody_is_asked_or_lost_while_all_go_on():
    hub, _ = after(full(), (0, beat(8, waits_s=59.0)), (1, beat(7)), now_s=5.0)
    assert membership.tick(hub, 6.0)[1] == [Outgoing(None, {"type": "beat"})]
    hub = asked(beat(8, waits_s=61.0), beat(7))
    hub, _ = after(hub, (1, beat(8)), (0, beat(9)))  # it has come meanwhile
    assert after(hub, (0, at()), (1, at()))[1] == []


def test_who_has_left_is_not_asked():
    hub, _ = after(full(), (0, {"type": "bye"}), (1, beat(7, waits_s=99.0)), now_s=5.0)
    hub, _ = membership.tick(hub, 6.0)
    assert after(hub, (1, at("saving", may_last=True)))[1] == []
