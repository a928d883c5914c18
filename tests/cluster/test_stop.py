"""A wish to stop: from a signal or a watcher, after a grace, on all processes after the same step."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

import jdist
from jdist.cluster.stop import preemption
from jdist.cluster.watch.hub import Hub
from jdist.cluster.watch.switchboard import Switchboard
from jdist.cluster.watch.watch import Place, Watch
from jdist.errors import ClusterError


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
    """The lines of two processes to process 0."""
    server = socket.create_server(("127.0.0.1", 0))
    switchboard = Switchboard(server, Hub(count=2, silence_s=30.0), "", 0.1)
    made, lost = {}, []

    def join(process):
        host, port = server.getsockname()
        place = Place(process=process, count=2, address=None, host=host, port=port, token="")
        made[process] = Watch(place, start_timeout_s=30.0, silence_s=30.0, on_lost=lost.append)

    threads = [threading.Thread(target=join, args=(process,)) for process in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    yield made[0], made[1]
    for watch in made.values():
        watch.say_bye()
        watch.close()
    switchboard.close()
    assert lost == []


def test_all_stop_behind_the_furthest_also_if_that_one_cannot_answer_now(two):
    behind, ahead = two
    assert not any(behind.stops_after(step, 30.0) for step in range(4))
    assert not any(ahead.stops_after(step, 30.0) for step in range(6))
    # `ahead` now waits for its devices, which wait for the steps 4 and 5 of `behind`.
    behind.wish_to_stop("SIGTERM")
    deadline_s = time.monotonic() + 30
    while behind.stopping is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert [behind.stops_after(step, 30.0) for step in (4, 5, 6)] == [False, False, True]
    assert ahead.stops_after(6, 30.0)
    assert ahead.stopping == "SIGTERM"


def test_it_is_public():
    assert jdist.cluster.preemption is preemption
