"""`jdist run` under a parameter server, killed and run again: it goes on from its checkpoint, nothing counts twice."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jdist.experiment.load import load
from jdist.experiment.prepare import prepare
from jdist.experiment.validate import validate
from jdist.train import Checkpointer
from tests.ps.real_cluster import BOUND_S, wait_until
from tests.ps.servers import ROOT, environment

pytestmark = pytest.mark.xdist_group(__name__)  # they share their servers

STEPS = 450
CONFIG = """\
name: toy
task: {make: "toy_regression:make"}
train: {global_batch: 16, steps: 450, optimizer: {name: adamw, learning_rate: 1e-3}}
checkpoint: {every: 75}
log: {every: 25}
strategy: {name: parameter_server, %s}
"""


def run(folder, environ, *, kill=False):
    """Runs the config; kills it, if asked to, at its first line after a checkpoint. Its exit code, and what it said."""
    paths = f"{ROOT}:{ROOT / 'tests' / 'experiment'}"
    said = []
    with subprocess.Popen(
        [sys.executable, "-m", "jdist", "run", "toy.yaml"],
        cwd=folder,
        env=environment({"PYTHONPATH": paths, **environ}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout:
            said.append(line)
            if kill and any((folder / "runs" / "toy" / "checkpoints").glob("step_*")):
                process.kill()
        return process.wait(120), "".join(said)


def check_end(folder, monkeypatch):
    """That the state at the end is the one after just so many updates."""
    monkeypatch.chdir(folder)
    document = load("toy.yaml", ["strategy={name: one_device}"])
    parts = prepare(validate(document), document)
    like = parts.strategy.init(lambda key: parts.task.create_state(key, parts.optimizer), jax.random.key(0))
    with Checkpointer("runs/toy/checkpoints") as checkpoints:
        restored = checkpoints.restore(like)
    counts = [int(x) for x in jax.tree.leaves(restored.state.opt_state) if x.dtype == np.int32]
    assert (restored.step, int(restored.state.step), set(counts)) == (STEPS, STEPS, {STEPS})


@pytest.fixture
def chief(cluster):
    """The environment of the cluster's chief."""
    jobs = {"chief": ["127.0.0.1:1"], **cluster.addresses}
    return {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": "chief", "index": 0}})}


def killed_and_run_again(folder, monkeypatch, options, environ):
    (folder / "toy.yaml").write_text(CONFIG % options)
    code, said = run(folder, environ, kill=True)
    assert code == -9, said
    code, said = run(folder, environ)
    assert (code, "going on from step" in said) == (0, True), said
    check_end(folder, monkeypatch)


def test_with_servers_that_outlive_it(chief, tmp_path, monkeypatch):
    killed_and_run_again(tmp_path, monkeypatch, "keep_servers: true", chief)


SCRIPT = """
import sys
import jdist
from tests.ps import counting
strategy = jdist.parameter_server(insecure=True, keep_servers=True)
step, state = jdist.distribute(counting.step, strategy), strategy.init(counting.create)
for i in range(int(sys.argv[1])):
    state, metrics = step(state, counting.batch(i))
    if i % 50 == 0:
        print(float(metrics["total"]), flush=True)
"""


def test_a_script_too_ends_with_the_code_after_which_no_launcher_starts_it_again(chief, tmp_path):
    """Two launchers with restarts would else take the servers from each other for ever."""

    def start(steps):
        command = [sys.executable, "-c", SCRIPT, str(steps)]
        return subprocess.Popen(command, env=environment(chief), stdout=-1, stderr=subprocess.STDOUT, text=True)

    with start(10_000_000) as first:
        assert first.stdout.readline()
        with start(100) as second:
            said, _ = second.communicate(timeout=2 * BOUND_S)
        assert second.returncode == 0, said
        said, _ = first.communicate(timeout=BOUND_S)
    assert first.returncode == 2, said
    assert "JobReplacedError: another coordinator (process " in said


def test_a_second_one_takes_over_and_the_first_says_by_whom_and_leaves_the_servers_alone(
    cluster, chief, tmp_path, monkeypatch
):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        steps = "steps: 1000000" if name == "first" else f"steps: {STEPS}"
        (tmp_path / name / "toy.yaml").write_text((CONFIG % "keep_servers: false").replace(f"steps: {STEPS}", steps))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, tmp_path / "first", chief)
        wait_until(lambda: first.done() or any((tmp_path / "first/runs/toy/checkpoints").glob("step_*")))
        assert not first.done(), first.result()
        code, said = run(tmp_path / "second", chief)
        assert code == 0, said
        code, said = first.result(BOUND_S)
    assert code == 2, said
    assert re.search(
        r"another coordinator \(process \d+ of .*\) has taken over the parameter servers: their history", said
    )
    check_end(tmp_path / "second", monkeypatch)
    for process in cluster.processes.values():  # the second one has ended them
        process.wait(BOUND_S)


@pytest.mark.soak
def test_with_servers_of_this_machine_that_end_with_it(tmp_path, monkeypatch):
    killed_and_run_again(tmp_path, monkeypatch, "local_workers: 2, local_ps: 2", {})
