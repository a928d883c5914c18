"""Servers of this machine that end are started again, and not for ever."""

import types

import pytest

from jdist.ps import local


class Clock:
    """Time that passes when somebody waits; an event that is set after so many seconds."""

    def __init__(self, end_s):
        self.now, self._end_s = 0.0, end_s

    def monotonic(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds
        return self.now > self._end_s

    def set(self):
        pass


class Process:
    """A process that ends after so many seconds."""

    stdin = None

    def __init__(self, clock, seconds):
        self._clock, self._end = clock, clock.now + seconds

    def poll(self):
        return None if self._clock.now < self._end else 1

    def wait(self, timeout_s):
        return 1


@pytest.mark.parametrize(("lives_s", "restarts"), [(0.0, 10), (50.0, 10), (70.0, 70)])
def test_one_that_serves_for_long_between_is_always_started_again(monkeypatch, lives_s, restarts):
    clock, made = Clock(5000.0), []
    monkeypatch.setattr(local, "time", types.SimpleNamespace(monotonic=clock.monotonic))

    def restart(number):
        made.append(number)
        return Process(clock, lives_s)

    local._keep([Process(clock, lives_s)], clock, restart=restart)
    assert len(made) == pytest.approx(restarts, abs=2)
