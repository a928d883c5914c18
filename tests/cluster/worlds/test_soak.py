"""Random faults at random moments: no row is lost or doubled, nobody hangs, and the parameters are those without faults."""

from __future__ import annotations

import os
import random
import signal
import time

import numpy as np
import pytest

from tests.cluster.worlds.jobs import job

pytestmark = [pytest.mark.soak, pytest.mark.xdist_group("worlds")]
EPOCHS = 20  # of ten steps
SCHEDULES = int(os.environ.get("JDIST_SOAK_SCHEDULES", "10"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    found = {}
    for processes in (2, 3, 4):
        with job(tmp_path_factory.mktemp(f"undisturbed_{processes}"), processes, epochs=EPOCHS) as running:
            found[processes] = running.end(*running.processes)[0]
    return found


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_random_faults_lose_no_row_and_change_no_number(tmp_path, undisturbed, seed):
    draw = random.Random(seed)
    processes, spares = draw.choice([2, 3, 4]), draw.choice([0, 0, 1, 2])
    faults = sorted((draw.randrange(0, 180), draw.choice(["kill", "kill", "stop", "start", "leave"])) for _ in range(3))
    with job(tmp_path, processes, epochs=EPOCHS, spares=spares) as running:
        living, stopped = list(running.processes), []
        running.wait_for(lambda: any(running.where(each)["step"] >= 0 for each in living), "first step")
        for step, fault in faults:
            members = [each for each in living if running.where(each)["generation"] >= 0]
            running.go_on_to(step)
            deadline = time.monotonic() + draw.uniform(
                0, 1.0
            )  # in the middle of what the last fault has caused, or behind it
            running.wait_for(lambda: time.monotonic() > deadline, "moment")  # noqa: B023 - it is called at once
            if fault == "start" or len(members) < 2:  # one that has the state must be left
                living.append(running.start(len(running.processes)))
                continue
            victim = draw.choice(members)
            living.remove(victim)
            if fault == "leave":
                victim.terminate()
            else:
                victim.send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
                stopped += [victim] if fault == "stop" and draw.random() < 0.5 else []
        # 75: it came when the job had ended. -6: gloo aborts a process that gets a peer's next message in a broken exchange.
        found = running.end(*living, codes=(0, 75, -6))
        for each in stopped:
            each.send_signal(signal.SIGCONT)
        running.wait_for(lambda: all(each.poll() is not None for each in stopped), "end of those that stood still")
    assert found
    for each in found:
        assert set(each["seen"]) == {EPOCHS}
        for a, b in zip(each["w"], undisturbed[processes]["w"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)  # 200 steps in other orders of sums
