"""Runs in processes of their own, stopped by signals; the same command must bring them to the same end."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import toy_regression

from jdist.loop.report.times import Earlier, read_times
from tests.experiment.test_run import rows_of, saved_by

pytestmark = pytest.mark.xdist_group(__name__)  # they share the run that nothing happens to

CONFIG = """\
name: toy
task: {make: "toy_regression:make"}
train: {global_batch: 16, steps: 1500, optimizer: {name: adamw, learning_rate: 1e-3}}
eval: {every: 500, global_batch: 8}
checkpoint: {every: 150, best: eval/close, mode: max}
log: {every: 50}
platform: {cpu_devices: 2}
"""


@contextlib.contextmanager
def started(folder):
    """`jdist run toy.yaml` in a process of its own, which is gone when the block ends."""
    command = [sys.executable, "-m", "jdist", "run", "toy.yaml"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=folder, env=os.environ | toy_regression.ENVIRONMENT, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process, pattern):
    """Reads lines until one matches, and returns all of them; a run that ends first fails the test."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return "".join(lines)
    raise AssertionError(f"no line matched {pattern!r}:\n{''.join(lines)}")


def finish(process):
    out, _ = process.communicate(timeout=120)
    return process.returncode, out


def run_to_end(folder):
    with started(folder) as process:
        return finish(process)


def final(folder):
    """Parameters, optimizer state and metrics at the end of the run."""
    with contextlib.chdir(folder):
        restored, rows = saved_by("runs/toy", "platform.cpu_devices=null"), rows_of("runs/toy")
    assert restored.step == 1500
    return [np.asarray(x) for x in jax.tree.leaves((restored.state.params, restored.state.opt_state))], rows


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """How the run ends if nothing happens to it."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "toy.yaml").write_text(CONFIG)
    code, out = run_to_end(folder)
    assert code == 0, out
    return final(folder)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.yaml").write_text(CONFIG)
    return tmp_path


def assert_same_end(folder, whole):
    state, rows = final(folder)
    for ours, theirs in zip(state, whole[0], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert rows == whole[1]


def assert_times(outcomes, *, at_least=None):
    """Each attempt that came to its first step is in `times.jsonl`; the last rows' goodput is what the lines of all lead to."""
    lines = read_times("runs/toy")
    attempts = [[line for line in lines if line["attempt"] == n] for n in range(lines[-1]["attempt"] + 1)]
    found = [next((line["outcome"] for line in attempt if line.get("event") == "end"), None) for attempt in attempts]
    assert found == outcomes[-len(found) :]
    assert len(found) >= (len(outcomes) if at_least is None else at_least)
    begin = attempts[-1][0]
    earlier = Earlier(lines[: lines.index(begin)], step=begin["step"], at=begin["at"])
    steps_s = sum(line["seconds"].get("steps", 0.0) for line in attempts[-1] if "part" in line)
    (end,) = (line for line in attempts[-1] if line.get("event") == "end")
    goodput = (earlier.steps_s + steps_s) / (earlier.wall_s + end["at"] - begin["at"])
    last = json.loads(Path("runs/toy/metrics.jsonl").read_text().splitlines()[-1])
    assert last["goodput"] == pytest.approx(goodput, rel=0.1)  # the last save comes behind the row
    assert 0 < earlier.steps_s < earlier.wall_s


@pytest.mark.full
def test_killed_at_random_moments_it_ends_with_the_same_bits(folder, whole):
    draw = random.Random(5)
    moments = ["global batch", *(f"step +{draw.randrange(n, n + 450, 50)}/1500|finished" for n in (50, 500))]
    for moment in moments:
        with started(folder) as process:
            read_until(process, moment)  # and what it is doing by the time the signal comes, chance decides
            process.send_signal(signal.SIGKILL)
            assert finish(process)[0] in (-signal.SIGKILL, 0)
    code, out = run_to_end(folder)
    assert code == 0, out
    assert "going on from step" in out
    assert_same_end(folder, whole)
    assert_times([*[None] * (len(moments) - 1), "finished"], at_least=2)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_leaves_with_a_word_on_how_to_go_on(folder, whole, number, code):
    with started(folder) as process:
        read_until(process, "step +350/1500")
        process.send_signal(number)
        left, out = finish(process)
    assert left == code, out
    said = re.search(r"stopped at step ([\d,]+) of 1,500 and saved; go on with: jdist run toy\.yaml\n", out)
    assert said, out
    assert "Traceback" not in out
    if number == signal.SIGTERM:
        return  # the rest is the same
    code, out = run_to_end(folder)
    assert code == 0, out
    assert f"going on from step {said.group(1)} of 1,500" in out
    assert_same_end(folder, whole)
    assert_times(["interrupted", "finished"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_prepares_or_compiles(folder, number):
    with started(folder) as process:
        read_until(process, "1,500 steps")
        process.send_signal(number)
        left, out = finish(process)
    assert left == 128 + number, out
    assert "Traceback" not in out
    assert re.search("stopped (before the first of|at step \\S+ of) 1,500", out), out


@pytest.mark.parametrize("keeps", [True, False])
def test_a_run_that_goes_on_takes_what_was_compiled(folder, monkeypatch, keeps):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    kept: list[set[str]] = []
    for steps in (150, 300):
        config = CONFIG.replace("steps: 1500", f"steps: {steps}").replace(
            "{cpu_devices: 2}", "{cpu_devices: 2, compilation_cache: %s}"
        )
        (folder / "toy.yaml").write_text(config % str(keeps).lower())
        code, out = run_to_end(folder)
        assert code == 0, out
        kept.append({file.name for file in folder.glob("runs/toy/compiled/*-cache")})
    assert bool(kept[0]) == keeps
    assert {name for name in kept[1] - kept[0] if not name.startswith("jit_copy")} == set()  # all of it was there
