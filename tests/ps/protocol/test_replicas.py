"""Two copies of a shard: no acknowledged update is lost unless both are, in every order of what can happen."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.ps.protocol.leadership import Announce, Heartbeat, HeartbeatLost, Lead, StateLost, begin, handle
from jdist.ps.protocol.replica_role import Role, depose, install, lead, take
from tests.by_default import some
from tests.ps.protocol.replica_world import Budget, Copy, World, begun, moves, problem, start


def explore(world: World, most: int = 5_000_000) -> int:
    """Goes through all worlds that can come of one; the number of them."""
    seen, todo = {hash(world)}, [(world, None)]
    while todo:
        world, story = todo.pop()
        wrong = problem(world)
        assert wrong is None, told(wrong, story)
        for what, make in moves(world):
            try:
                after = make()
            except AssertionError as exc:
                raise AssertionError(told(str(exc), (what, story))) from exc
            if (name := hash(after)) not in seen:
                seen.add(name)
                todo.append((after, (what, story)))
        assert len(seen) < most, told("it does not end", story)
    return len(seen)


def told(wrong, story):
    """What went wrong, and how it came to that."""
    found = []
    while story is not None:
        what, story = story
        found.append(what)
    return "\n".join([wrong, *reversed(found[-60:] if len(found) > 200 else found)])


BEGINNINGS = {
    "nothing wrong": Budget(),
    "one is killed": Budget(kills=1),
    "one is suspected": Budget(suspicions=1),
    "a message is lost": Budget(losses=1),
}
EXHAUSTIVE = {
    "nothing wrong": (2, Budget()),
    "one is killed": (2, Budget(kills=1)),
    "one is suspected": (2, Budget(suspicions=1)),
    "the link is cut": (2, Budget(cuts=1)),
    "a message is lost": (2, Budget(losses=1)),
    "a message comes twice": (2, Budget(duplicates=1)),
    "one is killed, a message is lost": (2, Budget(kills=1, losses=1)),
    "one is killed, a message comes twice": (1, Budget(kills=1, duplicates=1)),
    "one is suspected, a message comes twice": (1, Budget(suspicions=1, duplicates=1)),
    "one is suspected and one killed": (1, Budget(kills=1, suspicions=1)),
    "both are suspected": (1, Budget(suspicions=2)),
    "both are killed": (1, Budget(kills=2)),
    "the link is cut, and one is killed": (1, Budget(cuts=1, kills=1)),
    "the link is cut, and one is suspected": (1, Budget(cuts=1, suspicions=1)),
}
IN_PART = Copy(role=Role(term=3, name="follows"), state=(1, (0,)))
LEFT = [
    IN_PART,
    Copy(),
    Copy(role=Role(term=3), state=(1, (0,))),
    Copy(role=Role(term=3, name="leads", number=1), state=(1, (0,))),
    Copy(role=Role(term=3, name="leads", number=1, backup="in_sync"), state=(1, (0,))),
    Copy(role=Role(term=2, name="follows", number=1, complete=True), state=(1, (0,))),
]
LARGE = {
    "two closures, one is suspected and one killed": (2, Budget(kills=1, suspicions=1)),
}


@pytest.mark.parametrize("case", BEGINNINGS)
def test_a_job_begins_over_whatever_an_earlier_one_left(case):
    long = case in ("one is killed", "one is suspected")
    for copies in itertools.product(LEFT, LEFT):
        if IN_PART in copies or not long:
            explore(begun(copies, closures=1, budget=BEGINNINGS[case]))


@pytest.mark.parametrize(
    "case",
    [
        *some(EXHAUSTIVE, list(EXHAUSTIVE)[:9]),
        *(pytest.param(case, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]) for case in LARGE),
    ],
)
def test_in_every_order_of_a_small_history(case):
    closures, budget = {**EXHAUSTIVE, **LARGE}[case]
    assert explore(start(closures=closures, budget=budget)) > 5


def wander(world, randomness, most=4000):
    """Goes one random way to its end."""
    story = []
    while todo := sorted(moves(world), key=lambda move: move[0]):
        what, make = randomness.choice(todo)
        story.append(what)
        world = make()
        wrong = problem(world)
        assert wrong is None, "\n".join([wrong, *story])
        assert len(story) < most, story[-50:]
    return world


@settings(deadline=None, max_examples=150)
@given(randomness=st.randoms(use_true_random=False))
def test_in_random_orders_of_long_histories(randomness):
    budget = Budget(kills=3, suspicions=3, cuts=2, losses=3, duplicates=4)
    wander(start(closures=6, budget=budget), randomness)


@pytest.mark.soak
@settings(deadline=None, max_examples=1000)
@given(randomness=st.randoms(use_true_random=False))
def test_in_random_orders_of_very_long_histories(randomness):
    wander(
        start(closures=20, budget=Budget(kills=8, suspicions=8, cuts=6, losses=10, duplicates=15)),
        randomness,
        most=20_000,
    )


@settings(deadline=None, max_examples=100)
@given(randomness=st.randoms(use_true_random=False))
def test_the_loss_of_one_copy_never_costs_the_state(randomness):
    budget = Budget(kills=1, losses=2, duplicates=3)
    assert wander(start(closures=4, budget=budget), randomness).rollbacks == 0


def test_a_leader_that_acknowledges_at_once_would_be_found(monkeypatch):
    monkeypatch.setattr("jdist.ps.protocol.replica_role.may_answer", lambda role, number: role.name != "follows")
    with pytest.raises(AssertionError, match="counts as holding everything"):
        explore(start(closures=1, budget=Budget(kills=1)))


def test_a_backup_that_heeds_a_lower_term_would_be_found(monkeypatch):
    def heedless(role, *, term, number):
        return take(dataclasses.replace(role, name="follows", complete=True, term=term), term=term, number=number)

    monkeypatch.setattr("jdist.ps.protocol.replica_role.take", heedless)
    with pytest.raises(AssertionError, match=r"counts as holding everything|took effect twice|not in step|copies"):
        explore(start(closures=2, budget=Budget(suspicions=1)))


def test_a_copy_of_the_state_that_comes_twice_takes_nothing_back():
    role, took = install(Role(), term=2, number=5)
    assert took == "taken"
    role, took = take(role, term=2, number=6)
    assert took == "taken"
    assert install(role, term=2, number=5) == (role, "again")


def test_a_leader_of_a_lower_term_is_told_of_the_higher_one():
    leads = lead(Role(), term=3, backup=False)
    assert take(leads, term=2, number=1) == (leads, "term")
    assert install(leads, term=2, number=9) == (leads, "term")
    assert depose(lead(Role(), term=2, backup=True), term=3) == Role(term=3, name="follows")
    assert lead(leads, term=3, backup=True) == leads
    assert lead(Role(term=3, name="follows"), term=4, backup=False).name == "follows"  # it has no state


def test_who_is_promoted():
    replicas, (first,) = begin(term=1, alive=("a", "b"))
    assert first == Lead(copy=0, incarnation="a", term=1, backup="b", anew=True)
    replicas, commands = handle(replicas, Heartbeat(copy=0, incarnation="a", term=1, leads=True, in_sync="b"))
    assert commands == [Announce(copy=0, term=1)]
    promoted, commands = handle(replicas, HeartbeatLost(copy=0))
    assert commands == [Lead(copy=1, incarnation="b", term=2, backup=None)]
    alone, commands = handle(replicas, HeartbeatLost(copy=1))
    assert commands == [Lead(copy=0, incarnation="a", term=2, backup=None)]
    waits, commands = handle(alone, HeartbeatLost(copy=0))
    assert (waits.term, commands) == (2, [])  # who has the state may only be slow
    _, commands = handle(alone, Heartbeat(copy=0, incarnation="c", term=0, leads=False))
    assert commands == [StateLost(), Lead(copy=0, incarnation="c", term=3, backup=None)]
    assert promoted.holds == (None, "b")
