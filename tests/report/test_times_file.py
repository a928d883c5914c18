"""`times.jsonl`, and what is kept of the time of a run that was killed and restarted."""

import json

import pytest

from jdist.report.times_file import NAME, Earlier, TimesFile, read_times


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
