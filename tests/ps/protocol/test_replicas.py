"""Two copies of a shard: no acknowledged update is lost unless both are, in every order of what can happen."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.ps.protocol.leadership import Announce, Heartbeat, Lead, StateLost, begin, handle
from jdist.ps.protocol.replica_role import Role, depose, install, lead, take
from tests.by_default import some
from tests.ps.protocol import replica_world
from tests.ps.protocol.explore import explore, wander
from tests.ps.protocol.replica_world import Budget, Copy, begun, start

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
            explore(replica_world, begun(copies, closures=1, budget=BEGINNINGS[case]))


@pytest.mark.parametrize(
    "case",
    [
        *some(EXHAUSTIVE, list(EXHAUSTIVE)[:9]),
        *(pytest.param(case, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]) for case in LARGE),
    ],
)
def test_in_every_order_of_a_small_history(case):
    closures, budget = {**EXHAUSTIVE, **LARGE}[case]
    assert explore(replica_world, start(closures=closures, budget=budget)) > 5


@settings(deadline=None, max_examples=150)
@given(randomness=st.randoms(use_true_random=False))
def test_in_random_orders_of_long_histories(randomness):
    budget = Budget(kills=3, suspicions=3, cuts=2, losses=3, duplicates=4)
    wander(replica_world, start(closures=6, budget=budget), randomness, most=4000)


@pytest.mark.soak
@settings(deadline=None, max_examples=1000)
@given(randomness=st.randoms(use_true_random=False))
def test_in_random_orders_of_very_long_histories(randomness):
    wander(
        replica_world,
        start(closures=20, budget=Budget(kills=8, suspicions=8, cuts=6, losses=10, duplicates=15)),
        randomness,
        most=20_000,
    )


@settings(deadline=None, max_examples=100)
@given(randomness=st.randoms(use_true_random=False))
def test_the_loss_of_one_copy_never_costs_the_state(randomness):
    budget = Budget(kills=1, losses=2, duplicates=3)
    assert wander(replica_world, start(closures=4, budget=budget), randomness, most=4000).rollbacks == 0


def test_a_leader_that_acknowledges_at_once_would_be_found(monkeypatch):
    monkeypatch.setattr("jdist.ps.protocol.replica_role.may_answer", lambda role, number: role.name != "follows")
    with pytest.raises(AssertionError, match="counts as holding everything"):
        explore(replica_world, start(closures=1, budget=Budget(kills=1)))


def test_a_backup_that_heeds_a_lower_term_would_be_found(monkeypatch):
    def heedless(role, *, term, number):
        return take(dataclasses.replace(role, name="follows", complete=True, term=term), term=term, number=number)

    monkeypatch.setattr("jdist.ps.protocol.replica_role.take", heedless)
    with pytest.raises(AssertionError, match=r"counts as holding everything|took effect twice|not in step|copies"):
        explore(replica_world, start(closures=2, budget=Budget(suspicions=1)))


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
    assert first == Lead(copy=0, incarnation="a", term=1, backup="b", new_job=True)
    replicas, commands = handle(
        replicas, Heartbeat(copy=0, incarnation="a", term=1, leads=True, backup="b", in_sync="b")
    )
    assert commands == [Announce(copy=0, term=1)]
    promoted, commands = handle(replicas, Heartbeat(copy=0, incarnation=None))
    assert commands == [Lead(copy=1, incarnation="b", term=2, backup=None)]
    alone, commands = handle(replicas, Heartbeat(copy=1, incarnation=None))
    assert commands == [Lead(copy=0, incarnation="a", term=2, backup=None)]
    waits, commands = handle(alone, Heartbeat(copy=0, incarnation=None))
    assert (waits.term, commands) == (2, [])  # who has the state may only be slow
    _, commands = handle(alone, Heartbeat(copy=0, incarnation="c", term=0, leads=False))
    assert commands == [StateLost(), Lead(copy=0, incarnation="c", term=3, backup=None, new_job=True)]
    assert promoted.holds == (None, "b")


def test_a_copy_that_another_coordinator_has_led_leads_again():
    replicas, _ = begin(term=1, alive=("a", None))
    replicas, _ = handle(replicas, Heartbeat(copy=0, incarnation="a", term=1, leads=True))
    led = Heartbeat(copy=0, incarnation="a", term=4, leads=True)
    assert handle(replicas, led)[1] == [Lead(copy=0, incarnation="a", term=5, backup=None)]
    # An update fails before that is heard: it knows the term still.
    replicas, commands = handle(replicas, Heartbeat(copy=0, incarnation="b", term=2, leads=False))
    assert commands == [StateLost(), Lead(copy=0, incarnation="b", term=2, backup=None, new_job=True)]
    replicas, commands = handle(replicas, Heartbeat(copy=0, incarnation="b", term=2, leads=False))
    assert commands == [Lead(copy=0, incarnation="b", term=3, backup=None, new_job=True)]
    # A backup that was in sync follows the other coordinator's leader, and may have a part of its state.
    replicas, _ = begin(term=1, alive=("a", "b"))
    replicas, _ = handle(replicas, Heartbeat(copy=0, incarnation="a", term=1, leads=True, backup="b", in_sync="b"))
    replicas, _ = handle(replicas, Heartbeat(copy=0, incarnation=None))
    _, commands = handle(replicas, Heartbeat(copy=1, incarnation="b", term=2, leads=False))
    assert commands == [StateLost(), Lead(copy=1, incarnation="b", term=3, backup=None, new_job=True)]


def test_another_coordinator_that_led_under_the_same_number_is_told_by_the_backup_and_outbid():
    replicas, _ = begin(term=1, alive=("a", "b"))
    alone = Heartbeat(copy=0, incarnation="a", term=1, leads=True)  # this coordinator has given it a backup
    replicas, commands = handle(replicas, alone)
    assert commands == [Lead(copy=0, incarnation="a", term=2, backup=None, new_job=True)]
    replicas, commands = handle(replicas, Heartbeat(copy=0, incarnation="a", term=2, leads=True))
    assert commands == [Lead(copy=0, incarnation="a", term=3, backup="b")]
    in_sync = Heartbeat(copy=0, incarnation="a", term=3, leads=True, backup="b", in_sync="b")
    replicas, commands = handle(replicas, in_sync)
    assert (replicas.holds, commands) == (("a", "b"), [Announce(copy=0, term=3)])


@pytest.mark.parametrize("resets", [0, 1, 2])
def test_another_coordinator_that_leads_the_only_copy_and_goes_keeps_nobody_waiting(resets):
    budget = Budget(others=2, resets=resets)
    explore(replica_world, begun((Copy(), Copy()), closures=2, budget=budget, is_single=True))
