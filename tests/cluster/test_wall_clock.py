"""A wall clock that is set while a job runs ends nothing: JAX's own heartbeat, which goes by it, decides nothing."""

import shutil
import subprocess
import time

import pytest

from tests.cluster.fault_jobs import BOUND_S, PYTHON, STEPS, Job
from tests.cluster.watch.test_watch import Job as Watches

# The clocks of a program, which somebody sets as soon as a file is there.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long set_by(void) { return access(getenv("SET_FILE"), F_OK) ? 0 : atol(getenv("SET_BY_S")); }
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, t);
    if (!code && id == CLOCK_REALTIME) t->tv_sec += set_by();
    return code;
}
int gettimeofday(struct timeval *t, void *zone) {
    struct timespec now;
    int code = clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec, t->tv_usec = now.tv_nsec / 1000;
    return code;
}
time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}
"""
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
    (tmp_path / "shim.c").write_text(SHIM)
    shim, is_set = tmp_path / "shim.so", tmp_path / "set"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, tmp_path / "shim.c", "-ldl"], check=True)

    def command(index):
        variables = [f"LD_PRELOAD={shim}", f"SET_FILE={is_set}", f"SET_BY_S={set_by_s}"]
        return ["env", *variables, PYTHON] if index == process else [PYTHON]

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
