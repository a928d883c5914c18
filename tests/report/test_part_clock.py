"""The time of a run by what it went to, by a clock that the tests turn."""

import random

import pytest

from jdist.report.part_clock import PartClock, shares


class Hand:
    """A clock, and the moment at which the devices ran out of steps."""

    def __init__(self):
        self.now, self.idle = 100.0, 0.0

    def clock(self):
        return PartClock(begun=100.0, clock=lambda: self.now, idle_since=lambda: self.idle)


@pytest.fixture
def hand():
    return Hand()


def test_idle_devices_cost_what_the_program_does_meanwhile(hand):
    clock = hand.clock()
    for part, seconds in (("input", 3.0), ("steps", 1.0), ("evaluation", 2.0), ("other", 0.5)):
        clock.enter(part)
        hand.now += seconds
    clock.settle()
    assert clock.seconds == pytest.approx(
        {"input": 3, "steps": 1, "evaluation": 2, "other": 0.5, "checkpoint": 0, "compile": 0, "startup": 0}
    )


@pytest.mark.parametrize(
    ("idle", "input_s"),
    [
        (None, 0.0),  # the step still runs: data that is not there yet keeps nobody waiting
        (101.0, 3.0),  # it ended a second after the wait had begun
        (99.0, 4.0),  # or before
        (104.0, 0.0),
    ],
)
def test_a_wait_for_data_begins_where_the_step_before_ends(hand, idle, input_s):
    clock = hand.clock()
    clock.enter("input")
    hand.now += 4
    hand.idle = idle
    clock.settle()
    assert (clock.seconds["input"], clock.seconds["steps"]) == (input_s, 4 - input_s)


def test_a_block_is_counted_apart_and_the_part_around_it_goes_on(hand):
    clock = hand.clock()
    clock.enter("other")
    hand.now += 1
    with clock.during("checkpoint"):
        hand.now += 5
    hand.now += 1
    clock.settle()
    assert (clock.seconds["other"], clock.seconds["checkpoint"]) == (2, 5)


def test_what_is_known_when_it_is_over_is_taken_from_what_it_was_counted_to(hand):
    clock = hand.clock()
    clock.enter("evaluation")
    hand.now += 2
    with clock.during("checkpoint"):
        hand.now += 1
    hand.now += 1
    clock.carve("compile", 2.5)  # all of the checkpoint, and what lies round it
    clock.carve("compile", 1.0)  # a compilation within: it is not counted twice
    hand.now += 1
    clock.settle()
    assert {part: s for part, s in clock.seconds.items() if s} == {"evaluation": 2.5, "compile": 2.5}


def test_the_parts_are_the_whole_whatever_happens(hand):
    clock, draw = hand.clock(), random.Random(0)
    for _ in range(2000):
        hand.now += draw.random()
        hand.idle = draw.choice([None, hand.now - draw.random(), hand.now + 1, 0.0])
        match draw.randrange(3):
            case 0:
                clock.enter(draw.choice(list(clock.seconds)))
            case 1:
                clock.carve("compile", 3 * draw.random())
            case 2:
                clock.settle()
    clock.settle()
    assert sum(clock.seconds.values()) == pytest.approx(hand.now - 100)
    assert min(clock.seconds.values()) >= 0
    assert sum(shares(clock.seconds).values()) == pytest.approx(1)
