"""When the launcher starts servers again."""

import pytest

from jdist.launcher.exit_cause import Task
from jdist.launcher.supervisor import Restarts

PS, WORKER = Task("ps", 0, serves=True), Task("worker", 0, serves=True)


@pytest.fixture
def running():
    """Both servers run since 0 s."""
    restarts = Restarts([PS, WORKER], seed=0)
    assert (restarts.next_at, restarts.due(0.0), restarts.next_at) == (0.0, [PS, WORKER], None)
    return restarts


def test_one_that_dies_is_due_alone_after_ever_longer_waits(running):
    now, waits = 0.0, []
    for _ in range(8):
        said = running.ended(PS, -9, now)
        assert said.startswith("ps 0 was killed by SIGKILL; started again in ")
        waits.append(running.next_at - now)
        assert running.due(now) == []
        now += waits[-1]
        assert running.due(now) == [PS]
    assert all(0.5 * 2**n <= wait <= 2**n for n, wait in enumerate(waits[:6]))
    assert max(waits) <= 60


def test_after_a_long_life_the_wait_is_short_again(running):
    for now in (0.0, 10.0, 20.0):
        running.ended(WORKER, 1, now)
        running.due(now + 60)
    running.ended(WORKER, 1, 1000.0)
    assert running.next_at <= 1001.0


def test_one_that_was_told_that_all_is_over_waits_for_the_next_attempt(running):
    assert running.ended(PS, 0, 5.0) == ""
    assert running.next_at is None
    running.attempt()
    assert running.due(6.0) == [PS]
    running.attempt()
    assert running.due(7.0) == []


def test_one_whose_settings_are_wrong_is_not_started_again(running):
    assert running.ended(WORKER, 2, 5.0) == "worker 0 ended with exit code 2; starting it again would not help"
    assert running.next_at is None
