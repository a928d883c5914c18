"""A wall clock that is set while a job runs ends nothing: JAX's own heartbeat, which goes by it, decides nothing."""

import shutil
import time

import pytest

from tests.cluster.fault_jobs import BOUND_S, PYTHON, STEPS, Job
from tests.cluster.watch.test_watch import Job as Watches
from tests.settable_clock import settable_clock

# JAX looks at its heartbeats every second.
GOES_ON = """
train(3)
print("trained", flush=True)
sys.stdin.readline()
end = time.monotonic() + 4
while strategy.cluster.exchange("go on", time.monotonic() < end, 30)[0]:
    train(10)
print("done", flush=True)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(("process", "set_by_s"), [(0, -30), (0, 3600), (1, -3600)])
def test_a_job_goes_on_when_the_wall_clock_of_a_process_is_set(tmp_path, process, set_by_s):
    variables, is_set = settable_clock(tmp_path, set_by_s)

    def command(index):
        return ["env", *(f"{k}={v}" for k, v in variables.items()), PYTHON] if index == process else [PYTHON]

    with Job(tmp_path, STEPS + GOES_ON, command=command) as job:
        for index in (0, 1):
            job.await_said(index, "trained")
        is_set.touch()
        for each in job.processes.values():
            each.stdin.write(b"\n")
            each.stdin.flush()
        assert job.codes(within_s=60 + BOUND_S) == [0, 0], job.out(0) + job.out(1)
        assert f"the wall clock of process {process} ({job.addresses[process]}) was set by {set_by_s:+} s" in job.out(
            process
        )
        assert "was set by" not in job.out(1 - process)


def test_the_watch_says_once_that_the_clock_was_set():
    ahead_s, said = 0.0, []
    job = Watches(1)
    try:
        watch = job.watch(0, wall_s=lambda: time.monotonic() + ahead_s, say=said.append)
        watch.exchanges.exchange("before", 0, 10.0)
        assert not said
        ahead_s = 90.0
        for name in ("after", "again"):  # each is an event, at which the watch looks at the clocks
            watch.exchanges.exchange(name, 0, 10.0)
        assert [line[:50] for line in said] == ["the wall clock of process 0 (n0:1) was set by +90 "]
    finally:
        watch.close()
        job.server.close()
