"""Whole sweeps of the toy task; each run is a process of its own."""

import csv
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import toy_regression

from jdist.cli.runs.sweep import failure

BREAKS = """
import dataclasses, toy_regression
class Broken(Exception): ...
def make():
    def train_step(state, batch):
        raise Broken("boom in task")
    return dataclasses.replace(toy_regression.make(), train_step=train_step)
"""


@pytest.fixture
def in_processes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", toy_regression.ENVIRONMENT["PYTHONPATH"])


def test_a_sweep_ends_in_one_table_and_one_plot_and_names_what_failed(jdist, in_processes):
    grid = ["--grid", "train.optimizer.learning_rate=1e-2,1e-1,1e30"]
    code, out, err = jdist("sweep", "toy.yaml", *grid, "train.steps=8", "--metric", "loss", "callbacks=[csv]")
    assert (code, err) == (1, "")
    folder = Path("runs/toy-sweep")
    rows = json.loads((folder / "table.json").read_text())
    assert [row["learning_rate"] for row in rows] == ["0.1", "0.01", "1.0e+30"]  # sorted by the loss
    assert rows[0]["loss"] < rows[1]["loss"]
    assert [row["status"].partition(":")[0] for row in rows] == ["finished", "finished", "failed"]
    assert "is NaN or infinite" in rows[2]["status"]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    with (folder / "table.csv").open() as file:
        assert [row["learning_rate"] for row in csv.DictReader(file)] == ["0.1", "0.01", "1.0e+30"]
    assert (folder / "table.txt").read_text() in out
    last = json.loads((folder / "learning_rate-0.1/metrics.jsonl").read_text().splitlines()[-1])
    assert rows[0]["loss"] == last["eval/loss"]

    stamp = (folder / "learning_rate-0.1/result.json").stat().st_mtime_ns
    alike = ["train.steps=8", "callbacks=[{csv: {path: metrics.csv}}]"]
    code, out, _ = jdist("sweep", "toy.yaml", *grid[:1], "train.optimizer.learning_rate=1e-2,1e-1", *alike)
    assert code == 0
    assert "2 runs, 2 of them finished before" in out
    assert (folder / "learning_rate-0.1/result.json").stat().st_mtime_ns == stamp
    null = "strategy.topology=null"  # as good as not given
    code, _, err = jdist("sweep", "toy.yaml", *grid[:1], "train.optimizer.learning_rate=1e-2", *alike, null)
    assert (code, err) == (0, "")
    code, _, err = jdist("sweep", "toy.yaml", *grid[:1], "train.optimizer.learning_rate=1e-2", *alike, "train.steps=12")
    assert code == 2
    assert "holds a finished run with a different config: train.steps: 8 there, 12 now" in err


def test_stopped_it_saves_and_the_same_command_goes_on(jdist, in_processes):
    config = toy_regression.CONFIG.replace("steps: 24", "steps: 4000").replace("every: 4}", "every: 50}")
    Path("long.yaml").write_text(config.replace("every: 8", "every: 2000"))
    command = ["sweep", "long.yaml", "platform.cpu_devices=1", "--grid", "train.seed=0"]
    log = Path("runs/toy-sweep/seed-0.log")
    process = subprocess.Popen([sys.executable, "-m", "jdist", *command], stdout=subprocess.PIPE, text=True)
    try:
        assert "1 run" in process.stdout.readline()
        assert "seed=0" in process.stdout.readline()
        with subprocess.Popen(["tail", "-F", "-n", "+1", str(log)], stdout=subprocess.PIPE, text=True) as tail:
            next(line for line in tail.stdout if re.search(r"step +50/4000", line))
            tail.terminate()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "stopped when 0 of 1 run had finished; the same command goes on" in out
    said = re.search(r"stopped at step ([\d,]+) of 4,000 and saved", log.read_text())
    assert said, log.read_text()
    code, out, _ = jdist(*command, "train.steps=4000")
    assert code == 0, out
    assert f"going on from step {said[1]}" in log.read_text()


def test_a_run_of_other_source_is_refused_by_a_sweep_and_a_run_that_goes_on_says_so(jdist):
    made = ["name=seed-0", "log.folder=runs/toy-sweep", "train.seed=0"]
    assert jdist("run", "toy.yaml", *made, "train.steps=8")[0] == 0
    copy = Path("runs/toy-sweep/seed-0/source/toy_regression.py")
    copy.write_text("# another model\n")
    for _ in range(2):  # finished, and then not
        code, _, err = jdist("sweep", "toy.yaml", "train.steps=8", "--grid", "train.seed=0")
        assert code == 2
        assert f"toy_regression.py has changed (the run's copy: {copy.parent})" in err
        copy.parents[1].joinpath("result.json").unlink(missing_ok=True)
    code, out, _ = jdist("run", "toy.yaml", *made, "train.steps=12")
    assert code == 0
    assert "warning: the task's source has changed since then, and steps from here on are its: toy_regression.py" in out
    assert "warning" not in jdist("run", "toy.yaml", *made, "train.steps=16")[1]


def test_the_reason_of_a_failure_is_the_error_and_not_what_was_noted_with_it(jdist, in_processes):
    Path("breaks.py").write_text(BREAKS)
    code, out, _ = jdist("sweep", "toy.yaml", "task.make=breaks:make", "checkpoint.best=null", "--grid", "train.seed=0")
    assert code == 1
    assert "failed: exit code 1, breaks.Broken: boom in task; see " in out
    (row,) = json.loads(Path("runs/toy-sweep/table.json").read_text())
    assert row["status"] == "failed: exit code 1, breaks.Broken: boom in task"


@pytest.mark.parametrize(
    ("code", "log", "said"),
    [
        (1, "Traceback (most recent call last):\nE: 1\nTraceback (most recent call last):\n  x\nKeyError\nb: c\n", "KeyError"),
        (1, "Traceback (most recent call last):\n  x\nW0000 00:00:1 of XLA\na.b.E: of\n two: lines\n", "a.b.E: of"),
        (1, "Traceback (most recent call last):\n  cut short\n", "cut short"),
        (-9, "step 1\nstep 2\n", "step 2"),
        (-9, "", None),
        (1, "Traceback (most recent call last):\nE: 1\njdist: of its own.\n", "of its own"),
    ],
)  # fmt: skip
def test_a_log_tells_why_a_run_failed(tmp_path, code, log, said):
    (tmp_path / "a.log").write_text(log)
    ended = {1: "exit code 1", -9: "killed by signal 9"}[code]
    expected = said if said == "of its own" else ", ".join(filter(None, (ended, said)))
    assert failure(code, tmp_path / "a.log") == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["toy.yaml"], "needs something to try"),
        (["toy.yaml", "--grid", "train.stps=1,2"], "Did you mean train.steps?"),
        (["toy.yaml", "--grid", "train.optimizer.lr=1,2"], "train.optimizer.lr: optax."),
        (
            ["toy.yaml", "--grid", "train.optimizer.learning_rate=0.1,nope"],
            '"nope" is neither a number nor a schedule',
        ),
        (["toy.yaml", "--grid", "strategy.name=mirrored,mirored"], "Did you mean mirrored?"),
        (
            ["toy.yaml", "--grid", "callbacks=[{ema: {decay: 0.5}}],[{ema: {decay: 1}}]"],
            "callbacks.0.ema.decay: `decay`",
        ),
        (["toy.yaml", "--grid", "callbacks=[{profiler: {last: 9}}],[csv]"], "callbacks.0.profiler.last: `last` is 9"),
        (
            ["toy.yaml", "checkpoint.best=null", "--grid", "train.seed=1", "--metric", "close"],
            "--metric close: cannot tell from the name whether higher is better",
        ),
        (["toy.yaml", "--grid", "train.seed=1", "--mode", "least"], "`--mode` is 'least'; it must be 'max' or 'min'."),
    ],
)
def test_what_is_wrong_is_refused_before_anything_runs(jdist, arguments, said):
    code, _, err = jdist("sweep", *arguments)
    assert code == 2
    assert said in err
    assert not Path("runs").exists()
