"""Servers of this machine that end are started again, and not for ever; and they end with the program, not before it."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import types

import pytest

from jdist.ps import local
from tests.by_default import some
from tests.ps.real_cluster import local as local_strategy
from tests.ps.servers import environment


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


linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are watched by pidfd_open")

# A program with two workers and a server; what it does then is put behind. It says the servers' process ids.
PROGRAM = """
import os, signal, sys, threading, time
import jax, jax.numpy as jnp, optax
import numpy as np
import jdist

strategy = jdist.parameter_server(local_workers=2, local_ps=1)
tx = optax.sgd(0.1)

@jdist.distribute(strategy)
def train_step(state, batch):
    loss, grads = jdist.value_and_grad(lambda p: jdist.mean((batch["x"] @ p["w"]) ** 2, batch["mask"]))(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}

def steps(count):
    global state
    for _ in range(count):
        state, metrics = train_step(state, {"x": np.ones((8, 3), np.float32), "mask": np.ones(8, bool)})
    return metrics["loss"]

state = strategy.init(lambda key: jdist.TrainState.create(params={"w": jnp.zeros(3)}, tx=tx), jax.random.key(0))
float(steps(1))
pids = strategy.coordinator._job.servers.processes()
print(*pids, flush=True)
"""


@contextlib.contextmanager
def program(body):
    """The process of such a program, in a process group of its own, and file descriptors that tell its servers' ends."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM + body],
        env=environment({}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            pids = [int(pid) for pid in process.stdout.readline().split()]
            assert len(pids) == 3, process.stderr.read()
            watched = [os.pidfd_open(pid) for pid in pids]
            yield process, watched
        finally:
            process.kill()
        for each in watched:
            assert select.select([each], [], [], 60)[0], "a server outlives its program"
            os.close(each)


def test_closing_ends_every_process():
    with local_strategy(local_workers=1, local_ps=1) as strategy:
        pids = strategy.coordinator._job.servers.processes()
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


FAILS = ('raise ValueError("the user\'s")', 1, "\nValueError: the user's\n")


@linux
@pytest.mark.parametrize(("end", "code", "said"), some([("", 0, ""), FAILS], [FAILS]))
def test_a_program_may_end_with_closures_in_flight_and_has_the_last_word(end, code, said):
    with program(f"steps(3000)\n{end}") as (process, _):
        _, err = process.communicate(timeout=120)
        assert process.returncode == code, err
        assert err.endswith(said)
        assert err.count("\n") == (0 if not said else err.partition("Traceback")[2].count("\n"))
        assert err.startswith("Traceback" if said else "")


@linux
def test_an_interrupt_of_the_terminal_is_the_programs_alone():
    body = """
try:
    print("ready", flush=True)
    threading.Event().wait(60)
except KeyboardInterrupt:
    steps(20)
    print(int(strategy.fetch(state).step), strategy.coordinator.local_workers == pids[1:], flush=True)
strategy.coordinator.close()
"""
    with program(body) as (process, _):
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert (out, err, process.returncode) == ("21 True\n", "", 0)


@linux
def test_they_end_with_a_program_that_is_killed_though_its_child_lives_on():
    body = """
import warnings
warnings.simplefilter("ignore")
child = os.fork()  # it holds the other end of the servers' standard input
if not child:
    os.close(1)
    os.close(2)
    time.sleep(600)
print(child, flush=True)
threading.Event().wait(60)
"""
    with program(body) as (process, watched):
        child = int(process.stdout.readline())
        try:
            process.kill()
            for each in watched:
                assert select.select([each], [], [], 60)[0]
        finally:
            os.kill(child, signal.SIGKILL)
