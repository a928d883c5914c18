"""A wish to stop: from a signal or a watcher, after a grace, on all processes after the same step."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import jdist
from jdist.cluster.stop import preemption
from jdist.errors import ClusterError
from tests.cluster.watch.test_watch import Job as Watches
from tests.cluster.watch.test_watch import each, until


def stopped_at(stop, timeout_s=30.0):
    """The step that a loop stops after, and how long that took."""
    start_s = time.monotonic()
    for step in itertools.count():
        if stop.stops_after(step):
            return step, time.monotonic() - start_s
        assert time.monotonic() < start_s + timeout_s
        time.sleep(0.001)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_a_wish_and_the_handlers_come_back(number, code):
    before, saved = signal.getsignal(number), []
    with preemption(save=saved.append) as stop:
        assert not stop.stops_after(0)
        assert (stop.reason, stop.exit_code) == (None, 0)
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # at once again: a launcher and a scheduler both sent it
        step, _ = stopped_at(stop)
        assert stop.stops_after(step)  # and it stays so, and saves once
    assert saved == [step]
    assert (stop.reason, stop.exit_code) == (number.name, code)
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("strategy", [jdist.one_device, jdist.multi_worker])
def test_a_strategy_of_this_process_alone_may_train_again_after_a_stop(strategy):
    cluster = strategy().cluster
    with preemption(cluster=cluster) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        stopped_at(stop)
    with preemption(cluster=cluster) as stop:
        assert not stop.stops_after(0)
    assert cluster.stopping is None


@pytest.mark.parametrize("numbers", ["[SIGTERM, SIGTERM]", "[SIGINT, SIGTERM]"])
def test_a_second_signal_ends_the_process_at_once(numbers):
    code = f"""
import os, time
from signal import SIGINT, SIGTERM
from jdist.cluster import stop
stop._SAME_SIGNAL_S = 0.0
with stop.preemption() as wish:
    for number in {numbers}:
        os.kill(os.getpid(), number)
        while not wish.stops_after(1): time.sleep(0.001)
    time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == -signal.SIGTERM


def test_a_forked_child_is_ended_by_a_signal_that_the_job_does_not_hear_of():
    code = """
import os, signal
from jdist.cluster.stop import preemption
with preemption() as outer, preemption() as wish:
    there, child = os.pipe(), os.fork()
    if child == 0:
        signal.alarm(30)
        os.write(there[1], b"!")
        while True:
            signal.pause()
    os.read(there[0], 1)
    os.kill(child, signal.SIGTERM)
    ended_by = os.WTERMSIG(os.waitpid(child, 0)[1])
    assert ended_by == signal.SIGTERM, ended_by
    assert wish.reason is None and outer.reason is None
    os.kill(os.getpid(), signal.SIGTERM)
    while not wish.stops_after(1): pass
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=60, check=False)
    assert done.returncode == 0


def test_a_watcher_gives_notice_and_training_goes_on_for_the_grace():
    calls = itertools.count()
    with preemption(watcher=lambda: next(calls) == 2, poll_s=0.01, grace_s=0.3, exit_code=7) as stop:
        _, lasted_s = stopped_at(stop)
    assert lasted_s >= 0.3
    assert (stop.reason, stop.exit_code) == ("the watcher", 7)


def test_what_a_watcher_raises_reaches_the_loop():
    with preemption(watcher=lambda: 1 / 0 == 0, poll_s=0.01) as stop, pytest.raises(ZeroDivisionError):
        stopped_at(stop)


def test_outside_the_main_thread_signals_are_left_alone():
    found = []

    def work():
        with preemption() as stop:
            found.append((signal.getsignal(signal.SIGTERM), stop.stops_after(0)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert found == [(before, False)]


@pytest.mark.parametrize(
    "options", [{"grace_s": -1.0}, {"grace_s": float("nan")}, {"poll_s": 0}, {"exit_code": 256}, {"exit_code": True}]
)
def test_options_are_checked(options):
    with pytest.raises(ClusterError, match=f"`{next(iter(options))}` is "), preemption(**options):
        pass


@pytest.fixture
def two():
    """The watches of two processes."""
    job = Watches(2).start()
    yield job.watches[0], job.watches[1]
    each(lambda process: job.watches[process].say_bye(), range(2))
    each(lambda process: job.watches[process].part(), range(2))
    job.server.close()
    assert all(losses.empty() for losses in job.losses.values())


def test_all_stop_behind_the_furthest_also_if_that_one_cannot_answer_now(two):
    behind, ahead = two
    assert not any(behind.stops_after(step) for step in range(4))
    assert not any(ahead.stops_after(step) for step in range(6))
    # `ahead` now waits for its devices, which wait for the steps 4 and 5 of `behind`.
    behind.wish_to_stop("SIGTERM")
    until(lambda: behind.stopping is not None, "it did not hear of the wish")
    assert [behind.stops_after(step) for step in (4, 5, 6)] == [False, False, True]
    assert ahead.stops_after(6)
    assert ahead.stopping == "SIGTERM"


def test_all_stop_at_the_same_batch_of_an_evaluation(two):
    behind, ahead = two
    for watch, part in ((behind, 2), (ahead, 4)):
        assert not any(watch.stops_after(7, each) for each in range(part))
    ahead.wish_to_stop("SIGTERM")
    until(lambda: behind.stopping is not None, "it did not hear of the wish")
    assert [behind.stops_after(7, part) for part in (2, 3, 4)] == [False, False, True]
    assert ahead.stops_after(7, 4)
    assert ahead.stops_after(8)  # one whose evaluation ended before


def test_it_is_public():
    assert jdist.cluster.preemption is preemption
