"""Servers as real processes, which a test kills, stops and starts again as it likes."""

import contextlib
import os
import resource
import signal
import subprocess
import time

from jdist.cluster import ClusterSpec
from jdist.cluster.failpoints import VARIABLE
from jdist.launcher.environment import free_ports
from jdist.ps import Times, fixed_shards
from jdist.strategies.parameter_server import parameter_server
from tests.ps.servers import command, environment

BOUND_S = 60.0  # for whatever has to happen; a busy machine's
TIMES = Times(ping_s=0.2, lost_after_s=1.0, reconnect_s=0.1, max_losses=10_000, no_worker_timeout_s=60)


class Cluster:
    """Workers and parameter servers on loopback, with these environment variables; what they say goes to a folder."""

    def __init__(self, folder, *, workers=2, ps=2, variables=None):
        self.variables = variables or {}
        ports = self._addresses(workers + ps)
        self.folder, self.num_ps = folder, ps
        self.addresses = {"ps": ports[:ps], "worker": ports[ps:]}
        self.processes = {}
        self.start(*(("ps", i) for i in range(ps)), *(("worker", i) for i in range(workers)))

    def start(self, *who, failpoints=None):
        """Starts servers `(role, number)`, in the place of running ones, and waits until they listen."""
        self.kill(*who)
        for (role, number), at in zip(who, failpoints or [None] * len(who), strict=True):
            variables = self.variables | ({} if at is None else {VARIABLE: f"process=0:{at}"})
            with (self.folder / f"{role}{number}.err").open("ab") as err:
                self.processes[role, number] = subprocess.Popen(
                    [
                        *self._prefix(role, number),
                        *command("--role", role, "--address", self.addresses[role][number], "--grace-s", "600"),
                        *self._flags,
                    ],
                    env=environment(variables),
                    stdout=subprocess.PIPE,
                    stderr=err,
                    text=True,
                )
        for role, number in who:
            process = self.processes[role, number]
            with process.stdout:
                line = process.stdout.readline()
            assert " listens on " in line, (self.folder / f"{role}{number}.err").read_text()

    _flags = ()  # of `jdist serve`

    def _addresses(self, number):
        return [f"127.0.0.1:{port}" for port in free_ports(number)]

    def _prefix(self, role, number):
        return []

    def kill(self, *who):
        """SIGKILL."""
        for each in who:
            if each in self.processes:
                self.processes[each].kill()
        for each in who:
            if each in self.processes:
                self.processes[each].wait(BOUND_S)

    def stop(self, role, number):
        """SIGSTOP."""
        os.kill(self.processes[role, number].pid, signal.SIGSTOP)

    def resume(self, role, number):
        """SIGCONT."""
        os.kill(self.processes[role, number].pid, signal.SIGCONT)

    @contextlib.contextmanager
    def starved(self, *who):
        """Processes that can open no file, until the end or until what it gives is called."""
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)

        def limit(files):
            for each in who:
                resource.prlimit(self.processes[each].pid, resource.RLIMIT_NOFILE, (files, limits[1]))

        limit(3)
        try:
            yield lambda: limit(limits[0])
        finally:
            limit(limits[0])

    def await_killed(self, *who):
        """Waits until a failpoint has killed these."""
        for each in who:
            assert self.processes[each].wait(BOUND_S) == -signal.SIGKILL

    def ready(self):
        """Has every server run, without failpoints, whatever was done to it."""
        for role, number in self.processes:
            if self.processes[role, number].poll() is None:
                self.resume(role, number)
        self.start(*(who for who, process in self.processes.items() if process.poll() is not None))

    def strategy(self, *, times=TIMES, **options):
        """A parameter server over these, which go on when it is done."""
        jobs = {"chief": ("127.0.0.1:1",), **{role: tuple(found) for role, found in self.addresses.items()}}
        spec = ClusterSpec(jobs=jobs, task_type="chief", task_index=0)
        return parameter_server(
            spec, keep_servers=True, times=times, partitioner=fixed_shards(self.num_ps), start_timeout_s=60, **options
        )

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.wait()


@contextlib.contextmanager
def local(**options):
    """A parameter server of processes of this machine, which end with the block."""
    strategy = parameter_server(**options)
    try:
        yield strategy
    finally:
        strategy.coordinator.close()


def wait_until(holds, within_s=BOUND_S):
    """Waits for something that is to come in bounded time."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
