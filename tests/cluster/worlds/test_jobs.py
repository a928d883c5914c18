"""Processes that are killed, stopped and started while a job trains: the others go on, and every row counts once."""

from __future__ import annotations

import json
import signal

import numpy as np
import pytest

from tests.cluster.worlds.jobs import job

# Soak: about one kill in five leaves a survivor in gloo's `waitRecv`, and it ends itself, see docs/faults.md.
pytestmark = [pytest.mark.soak, pytest.mark.xdist_group("worlds")]
EPOCHS = 4  # of ten steps


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with job(tmp_path_factory.mktemp("undisturbed"), 3, epochs=EPOCHS) as running:
        return running.end(*running.processes)[0]


def check(found, undisturbed, *, exact):
    for each in found:
        assert set(each["seen"]) == {EPOCHS}
        assert each["w"] == found[0]["w"]
        assert each["rows"] == undisturbed["rows"]
        if exact:
            assert each["w"] == undisturbed["w"]
            assert each["losses"] == undisturbed["losses"]
        else:  # another number of processes sums in another order
            for a, b in zip(each["w"], undisturbed["w"], strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(each["losses"], undisturbed["losses"], rtol=2e-5)


def test_a_spare_takes_the_place_of_process_0_and_not_a_bit_changes(tmp_path, undisturbed):
    with job(tmp_path, 3, epochs=EPOCHS, spares=1) as running:
        first, second, third, spare = running.processes
        running.at(12, first, second, third)
        running.kill(first, second, third)
        running.at(20, second, third, spare)
        assert running.where(spare)["rank"] == 0
        check(running.end(second, third, spare), undisturbed, exact=True)
        rows = max((tmp_path / "rows").glob("*.jsonl"), key=lambda path: path.stat().st_mtime).read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == undisturbed["rows"]  # by the new process 0, whole


def test_two_go_on_then_a_third_comes_in_then_one_stands_still(tmp_path, undisturbed):
    with job(tmp_path, 3, epochs=EPOCHS) as running:
        first, second, third = running.processes
        running.at(8, first, second, third)
        running.kill(second, first, third)
        running.at(14, first, third)
        assert running.where(first)["of"] == 2
        fourth = running.start(1)
        running.go_on_to(15)
        running.wait_for(lambda: running.where(fourth)["generation"] == 2, "third process")
        running.at(24, first, third, fourth)
        assert running.where(first)["of"] == 3
        third.send_signal(signal.SIGSTOP)
        running.at(30, first, fourth)
        fourth.terminate()  # one that came in can also leave
        running.at(34, first)
        check(running.end(first), undisturbed, exact=False)
        running.wait_for(lambda: fourth.poll() is not None, "end of the process that was asked to leave")
        assert fourth.returncode == 143
        third.send_signal(signal.SIGCONT)  # it learns that the others have gone on
        running.wait_for(lambda: third.poll() is not None, "end of the process that stood still")
        assert third.returncode == 75


def test_a_process_that_is_asked_to_leave_does_so_between_two_steps(tmp_path, undisturbed):
    with job(tmp_path, 3, epochs=EPOCHS) as running:
        first, second, third = running.processes
        running.at(8, first, second, third)
        first.terminate()
        running.at(16, second, third)
        running.wait_for(lambda: first.poll() is not None, "end of the process that was asked to leave")
        assert first.returncode == 143
        check(running.end(second, third), undisturbed, exact=False)
