"""The time of a run by its parts, by a clock that the tests turn; `times.jsonl`, of a run that was killed and restarted."""

import json
import random

import pytest

from jdist.loop.report.times import NAME, Earlier, PartClock, TimesFile, read_times, shares


def begin(step, at):
    return {"event": "begin", "step": step, "at": at}


def train(first, step, steps_s, until=0.0):
    return {"part": "train", "end": until, "first": first, "step": step, "seconds": {"steps": steps_s, "input": 1.0}}


def end(outcome, at):
    return {"event": "end", "step": 0, "outcome": outcome, "at": at}


@pytest.mark.parametrize(
    ("lines", "step", "steps_s", "wall_s"),
    [
        ([], 0, 0, 0),
        # Killed at step 30, 20 is saved: ten steps are made again. 100 s passed.
        ([begin(0, 0.0), train(0, 20, 8), train(20, 30, 4)], 20, 8, 100),
        # Nothing was saved yet: all is made again.
        ([begin(0, 0.0), train(0, 20, 8)], 0, 0, 100),
        # A line that goes beyond the saved step counts up to there.
        ([begin(0, 0.0), train(0, 20, 8), train(20, 30, 4)], 25, 10, 100),
        # Twice: what the second start made again counts once.
        (
            [begin(0, 0.0), train(0, 20, 8), train(20, 30, 4), begin(20, 50.0), train(20, 40, 9, until=60.0)],
            40,
            17,
            100,
        ),
        # An older checkpoint than the last start's own.
        ([begin(0, 0.0), train(0, 20, 8), begin(20, 50.0), train(20, 40, 9, until=60.0)], 10, 4, 100),
        # A pause that somebody wanted is no loss; one after a failure or a preemption is.
        ([begin(0, 0.0), train(0, 20, 8), end("finished", 10.0)], 20, 8, 10),
        ([begin(0, 0.0), train(0, 20, 8), end("interrupted", 10.0)], 20, 8, 10),
        ([begin(0, 0.0), train(0, 20, 8), end("preempted", 10.0)], 20, 8, 100),
        ([begin(0, 0.0), train(0, 20, 8), end("failed", 10.0)], 20, 8, 100),
        # A save is made where the next start begins; the step before it was waited for.
        ([begin(0, 0.0), train(0, 20, 8), train(20, 20, 1)], 20, 9, 100),
        # The clock was set back before this start: the 150 s that the one before is known to have taken stay.
        ([begin(0, 200.0), train(0, 20, 8, until=350.0)], 20, 8, 150),
        # A line of a newer jdist is left alone.
        ([begin(0, 0.0), {"event": "moved", "step": 3}, train(0, 20, 8)], 20, 8, 100),
    ],
)
def test_what_is_kept_and_how_long_it_took(lines, step, steps_s, wall_s):
    earlier = Earlier(lines, step=step, at=100.0)
    assert (earlier.steps_s, earlier.wall_s) == (steps_s, wall_s)


def test_each_start_adds_its_lines_and_a_torn_one_is_dropped(tmp_path):
    first = TimesFile(tmp_path / "run", step=0, at=10.0, writes=True, about={"devices": 8})
    first.add("train", begin=10.0, end=12.0, first=0, step=5, seconds={"steps": 1.5, "input": 0.5, "other": 0.0})
    first.close()
    path = tmp_path / "run" / NAME
    path.write_text(path.read_text() + '{"step": 7, "atte')
    second = TimesFile(tmp_path / "run", step=5, at=20.0, writes=True, about={})
    second.end("finished", at=21.0, step=9)
    second.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 0, "attempt": 0, "event": "begin", "at": 10.0, "devices": 8},
        {
            "step": 5,
            "attempt": 0,
            "part": "train",
            "begin": 10.0,
            "end": 12.0,
            "first": 0,
            "seconds": {"steps": 1.5, "input": 0.5},
        },
        {"step": 5, "attempt": 1, "event": "begin", "at": 20.0},
        {"step": 9, "attempt": 1, "event": "end", "at": 21.0, "outcome": "finished"},
    ]
    assert len(read_times(tmp_path / "run")) == 4


def test_a_process_that_does_not_write_reads_what_was_there(tmp_path):
    TimesFile(tmp_path, step=0, at=10.0, writes=True, about={}).close()
    other = TimesFile(tmp_path, step=0, at=11.0, writes=False, about={})
    other.end("finished", at=12.0, step=0)
    other.close()
    assert len(other.earlier) == len(read_times(tmp_path)) == 1


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
