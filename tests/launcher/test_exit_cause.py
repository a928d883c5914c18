import signal

import pytest

from jdist.launcher.exit_cause import (
    End,
    Kind,
    Task,
    count_lost,
    describe,
    exit_code,
    find_guilty,
    kind,
    restart_may_help,
)

TERM, KILL = signal.SIGTERM, signal.SIGKILL


def end(code, index=0, at=0.0, sent=None):
    return End(task=Task("worker", index), code=code, at=at, sent=sent)


@pytest.mark.parametrize(
    ("code", "sent", "meaning"),
    [
        (0, None, Kind.WELL),
        (0, KILL, Kind.WELL),
        (1, None, Kind.CRASHED),
        (1, TERM, Kind.CRASHED),
        (-9, None, Kind.CRASHED),
        (-15, None, Kind.CRASHED),
        (-9, KILL, Kind.STALLED),
        (-11, KILL, Kind.CRASHED),
        (75, None, Kind.PEER_LOST),
        (143, None, Kind.LEFT),
        (130, None, Kind.LEFT),
        (143, TERM, Kind.WELL),
        (-15, TERM, Kind.WELL),
    ],
)
def test_what_an_end_means(code, sent, meaning):
    assert kind(end(code, sent=sent)) == meaning


@pytest.mark.parametrize(
    ("ends", "index"),
    [
        ([end(0), end(0, 1)], None),
        ([end(75, 0, 1.0), end(-9, 1, 2.0)], 1),
        ([end(1, 0, 2.0), end(-9, 1, 1.0)], 1),
        ([end(143, 0, 1.0), end(75, 1, 0.0)], 0),
        ([end(75, 0, 1.0), end(-9, 1, 9.0, KILL)], 1),
        ([end(1, 0, 1.0), end(-9, 1, 9.0, KILL)], 0),
        ([end(75, 0, 2.0), end(75, 1, 1.0)], 1),
    ],
)
def test_who_is_guilty(ends, index):
    found = find_guilty(ends)
    assert (found and found.task.index) == index


@pytest.mark.parametrize(
    ("ends", "number"),
    [
        ([end(0)], 0),
        ([end(75), end(75, 1)], 0),
        ([end(143), end(143, 1)], 0),
        ([end(1, 0, 1.0), end(1, 1, 2.0), end(-6, 2, 3.0)], 1),
        ([end(-9, 0, 1.0), end(-9, 1, 1.0), end(75, 2, 2.0)], 2),
        ([end(1, 0, 1.0), end(-9, 1, 9.0, KILL)], 1),
    ],
)
def test_how_many_to_do_without(ends, number):
    assert count_lost(ends) == number


@pytest.mark.parametrize(("code", "expected"), [(3, 3), (-9, 137), (-64, 192)])
def test_exit_codes(code, expected):
    assert exit_code(end(code)) == expected


def test_what_no_restart_mends():
    assert [code for code in (-9, 1, 2, 3, 74, 75, 126, 127, 143) if not restart_may_help(end(code))] == [
        2,
        74,
        126,
        127,
    ]


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (end(1), "ended with exit code 1"),
        (end(-11), "was killed by SIGSEGV"),
        (end(-50), "was killed by signal 50"),
        (end(75), "ended with exit code 75 (it lost a peer)"),
        (end(143), "ended with exit code 143 (asked to stop, not by the launcher)"),
        (end(-9, sent=KILL), "did not end and had to be killed"),
    ],
)
def test_in_words(ended, words):
    assert describe(ended) == words
