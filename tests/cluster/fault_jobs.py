"""What the fault tests share: jobs of real processes on loopback, which find each other by TF_CONFIG."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from jdist.launcher.environment import free_ports
from tests.children import without_devices

PYTHON = sys.executable
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 3.0  # a process that is not heard of for so long is lost
# All must be over by then: the time to notice a loss, to say it, and a busy machine's. The promise is 20 s for 10 s.
BOUND_S = 20.0

# JAX's processes without devices: starts quickly, and shows all that has to do with coming, going and being lost.
LIGHT = f"""\
import os, signal, sys, time
from jdist.cluster import runtime
from jdist.cluster.resolvers.resolve import resolve
spec = resolve(os.environ)
index, others_end = spec.process_index, {{"timeout_s": {TIMEOUT_S}, "start_timeout_s": 60}}
joined = runtime.start(spec, **others_end)
"""
# Steps over one device in each process; `train(steps)` reads the loss of each.
STEPS = f"""\
import os, signal, sys, time
import jax, jax.numpy as jnp, numpy as np
import jdist
strategy = jdist.multi_worker(communication={{"timeout_s": {TIMEOUT_S}, "start_timeout_s": 60}})
joined = strategy.cluster
index, count = joined.process_index, joined.num_processes

@jdist.distribute(strategy)
def step(state, batch):
    loss, grads = jdist.value_and_grad(lambda w: jdist.mean((batch["x"] @ w) ** 2, batch["mask"]))(state)
    return state - 0.01 * grads, {{"loss": loss}}

def rows(array):
    return jax.make_array_from_process_local_data(strategy.batch_sharding, array)

batch = {{"x": rows(np.ones((4, 4), np.float32)), "mask": rows(np.ones(4, bool))}}
state = jnp.ones(4)

def train(steps):
    global state
    for _ in range(steps):
        state, metrics = step(state, batch)
        float(metrics["loss"])
"""


class Job:
    """The processes of a job, each with standard output and error in a file.

    Args:
        folder: for scripts, output and records.
        script: what each runs.
        count: how many there are.
        failpoints: JDIST_FAILPOINTS.
        environ: further variables.
        hosts: of the processes; None: loopback.
        command: what comes before the script, for each process.
    """

    def __init__(
        self, folder, script, *, count=2, failpoints=None, environ=None, hosts=None, command=lambda _: [PYTHON]
    ):
        self.records = folder / "records"
        program = folder / "program.py"
        program.write_text(script)
        self.folder = folder
        hosts = hosts or ["127.0.0.1"] * count
        self.addresses = [f"{host}:{port}" for host, port in zip(hosts, free_ports(count), strict=True)]
        variables = without_devices() | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "JAX_PLATFORMS": "cpu",
            "PYTHONUNBUFFERED": "1",
            "JDIST_RECORD_DIR": str(self.records),
            **({} if failpoints is None else {"JDIST_FAILPOINTS": failpoints}),
            **(environ or {}),
        }
        self.processes = {}
        for index in range(count):
            config = {"cluster": {"worker": self.addresses}, "task": {"type": "worker", "index": index}}
            with (folder / f"{index}.out").open("wb") as out:
                self.processes[index] = subprocess.Popen(
                    [*command(index), str(program)],
                    env=variables | {"TF_CONFIG": json.dumps(config)},
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.stdin.close()
            process.wait()

    def out(self, index):
        """What a process has said."""
        return (self.folder / f"{index}.out").read_text()

    def code(self, index, within_s):
        """The exit code of a process; fails if it does not end."""
        try:
            return self.processes[index].wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"process {index} did not end within {within_s} s:\n{self.out(index)}") from None

    def codes(self, *indexes, within_s=60.0):
        """The exit codes of processes that end by themselves."""
        deadline = time.monotonic() + within_s
        return [self.code(index, max(0.1, deadline - time.monotonic())) for index in indexes or self.processes]

    def await_said(self, index, text, within_s=60.0):
        """Waits until a process says something."""
        deadline = time.monotonic() + within_s
        while text not in self.out(index):
            over = self.processes[index].poll() is not None or time.monotonic() > deadline
            assert not (over and text not in self.out(index)), f"{index} did not say {text!r}:\n{self.out(index)}"
            time.sleep(0.02)

    def await_stopped(self, index, within_s=60.0):
        """Waits until a process stands still."""
        stat, deadline = Path(f"/proc/{self.processes[index].pid}/stat"), time.monotonic() + within_s
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, f"{index} did not stop:\n{self.out(index)}"
            time.sleep(0.02)

    def resume(self, index):
        """Lets a process that stands still go on."""
        self.processes[index].send_signal(signal.SIGCONT)

    def record(self, index):
        """What a process has left behind of a loss: the same in its output as in its file."""
        said = re.search(r"^jdist: peer lost (\{.*\})$", self.out(index), re.MULTILINE)
        assert said is not None, self.out(index)
        written = json.loads((self.records / f"peer_lost_process_{index}.json").read_text())
        said = json.loads(said[1])
        assert {**said, "time": 0} == {**written, "time": 0}
        assert written["noticed_by"] == index
        return written

    def check_lost(self, index, *, lost):
        """That a process knows which was lost, and where it was."""
        record = self.record(index)
        assert (record["process"], record["address"]) == (lost, self.addresses[lost]), record
        return record
