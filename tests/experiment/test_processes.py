"""Runs in several real processes: as good as in one, stopped and killed ones too."""

import itertools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from toy_regression import CONFIG

from jdist.cli.main import main
from jdist.launcher.environment import free_ports
from tests.pictures import check_picture
from tests.toys import without_costs

pytestmark = pytest.mark.xdist_group("processes")
ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
LONG = """\
name: toy
task: {make: "toy_regression:make"}
strategy:
  name: multi_worker
  all_reduce: {name: compressed, dtype: int8}
  communication: {timeout_s: 5}
train: {global_batch: 16, steps: 120, optimizer: {name: adamw, learning_rate: 1e-2}}
eval: {every: 60, global_batch: 8}
checkpoint: {every: 20}
log: {every: 10}
"""


def launch(folder, *arguments, config=LONG, failpoints=(), what=("toy.yaml",)):
    """`jdist launch` of the toy in `folder`: the exit code and what it said."""
    (folder / "toy.yaml").write_text(config)
    options = [argument for argument in arguments if argument.startswith("--")]
    overrides = [argument for argument in arguments if not argument.startswith("--")]
    command = [sys.executable, "-m", "jdist", "launch", "--devices-per-process=1", "--log-dir=logs", *options, "--"]
    environ = {name: value for name, value in os.environ.items() if name != "JDIST_FAILPOINTS"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]))
    if failpoints:
        environ["JDIST_FAILPOINTS"] = ";".join(failpoints)
    with subprocess.Popen(
        [*command, *what, *overrides],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            out, _ = process.communicate(timeout=240)
        finally:
            process.kill()
    return process.returncode, out


def rows_of(folder, name="toy"):
    rows = [json.loads(line) for line in (folder / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    return without_costs(rows)


def last_save(folder):
    """What the newest checkpoint holds, with the crc32 of every leaf; its files and their names may differ."""
    path = max((folder / "runs/toy/checkpoints").glob("step_*"))
    body = json.loads((path / "manifest.json").read_text())["body"]
    return {key: body[key] for key in ("step", "data", "leaves")}


def assert_alike(ours, theirs):
    """The same data at each step, and losses that differ by rounding."""
    ours, theirs = ([row for row in rows if "loss" in row] for rows in (ours, theirs))
    assert [(row["step"], row["examples"]) for row in ours] == [(row["step"], row["examples"]) for row in theirs]
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=1e-4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder and the output of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    code, out = launch(folder)
    assert code == 0, out
    return folder, out


def test_the_chief_alone_reports_and_writes(whole):
    folder, out = whole
    said = [line for line in out.splitlines() if line.startswith("[1]")]
    assert not [line for line in said if "[Gloo]" not in line]
    assert "[0] global batch 16 = 2 replicas x 8" in out
    assert "[0] finished: 120 steps" in out
    assert sorted(path.name for path in (folder / "runs/toy").iterdir() if path.name[0] != ".") == [
        "checkpoints",
        "config.yaml",
        "curves.png",
        "environment.json",
        "metrics.jsonl",
        "result.json",
        "source",
        "times.jsonl",
    ]
    assert [row["step"] for row in rows_of(folder)] == list(range(10, 121, 10))
    assert any("pieces" in leaf for leaf in last_save(folder)["leaves"])  # what compression left out, by process


def test_it_is_repeated_bit_for_bit(whole):
    code, out = launch(whole[0], what=(sys.executable, "-m", "jdist", "run", "--replay", "runs/toy"))
    assert code == 0, out
    assert "[0] the environment is that of the run" in out
    assert re.search(r"\[0\] matched: 12 rows of metrics and the \d+ arrays of the state are equal bit for bit", out), (
        out
    )
    assert "[1] matched" not in out


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    """The folder and the output of the same run, killed in a save, stopped in one, and killed after a step."""
    folder = tmp_path_factory.mktemp("disturbed")
    draw = random.Random(11)
    code, out = launch(
        folder,
        "--max-restarts=3",
        "--grace-s=0.5",
        failpoints=[
            "process=1:save=in:kill@2",
            "process=0:attempt=1:save=in:stop",
            f"process={draw.randrange(2)}:attempt=2:step=after:kill@{draw.randrange(30, 60)}",
        ],
    )
    assert code == 0, out
    assert len(re.findall(r"^\[[01]\] jdist: failpoint ", out, re.MULTILINE)) == 3, out
    return folder, out


def test_killed_and_stopped_in_saves_and_steps_it_ends_with_the_same_bits(disturbed, whole):
    folder, out = disturbed
    resumed = re.findall(r"going on from step (\d+) of 120", out)
    assert resumed[:2] == ["20", "20"]
    assert len(resumed) == 3
    assert last_save(folder) == last_save(whole[0])
    assert rows_of(folder) == rows_of(whole[0])


def test_its_timeline_has_what_happened(disturbed, capsys):
    folder, out = disturbed
    assert main(["runs", "--timeline", str(folder / "runs/toy")]) == 0
    assert "3 restarts" in capsys.readouterr().out
    events = json.loads((folder / "runs/toy/timeline.json").read_text())["traceEvents"]
    attempts = [event for event in events if event.get("cat") == "attempt"]
    # Where each attempt went on from, and the process that each failpoint killed: as the launcher's output says.
    resumed = [int(step) for step in re.findall(r"going on from step (\d+) of 120", out)]
    assert [each["args"]["first_step"] for each in attempts] == [0, *resumed]
    assert [each["args"]["outcome"] for each in attempts[-1:]] == ["finished"]
    assert attempts[-1]["args"]["last_step"] == 120
    assert all(a["args"]["kept_step"] == b["args"]["first_step"] for a, b in itertools.pairwise(attempts))
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(attempts))
    lost = [each["args"]["steps_done_again"] for each in attempts]
    assert lost == [max(0, each["args"]["last_step"] - each["args"]["kept_step"]) for each in attempts]
    guilty = re.findall(r"\[launch\] attempt (\d): .*process (\d) was (?:killed|stopped|ended)", out)
    processes = [event for event in events if event.get("cat") == "process"]
    assert len(processes) == 8
    for attempt, process in guilty:
        (end,) = (
            each
            for each in processes
            if each["name"] == f"process {process}" and each["args"]["attempt"] == int(attempt)
        )
        assert end["args"]["code"] != 0
    assert sum(each["args"]["how"] == "killed by SIGKILL" for each in processes) >= 2
    saves = [event for event in events if event["name"] == "checkpoint"]
    assert {20, 40, 60, 80, 100, 120} <= {event["args"]["last_step"] for event in saves}
    assert {60, 120} <= {event["args"]["last_step"] for event in events if event["name"] == "evaluation"}
    check_picture((folder / "runs/toy/timeline.svg").read_text())


def test_one_asked_to_stop_all_stop_at_one_step_and_fewer_go_on(tmp_path, monkeypatch, capfd):
    config = CONFIG.replace("steps: 24", "steps: 800") + "strategy: {name: multi_worker}\n"
    code, out = launch(tmp_path, config=config, failpoints=["process=1:step=after:term@13"])
    assert code == 143, out
    said = re.search(r"\[0\] stopped at step (\d+) of 800 and saved", out)
    assert said is not None, out
    assert "Traceback" not in out
    assert "lost" not in out
    assert last_save(tmp_path)["step"] == int(said[1])
    end = int(said[1]) + 4
    monkeypatch.chdir(tmp_path)
    for name in ("toy", "other"):
        assert main(["run", "toy.yaml", f"train.steps={end}", f"name={name}"]) == 0
    assert f"going on from step {said[1]} of {end}" in capfd.readouterr().out
    assert_alike(rows_of(tmp_path), rows_of(tmp_path, "other"))


def test_a_process_whose_peer_does_not_come_asks_for_another_attempt(tmp_path):
    (tmp_path / "toy.yaml").write_text(LONG)
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}
    environ = os.environ | {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "jdist", "run", "toy.yaml", "strategy.communication.start_timeout_s=1"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 75, done.stderr
    assert "jdist: not all of the 2 processes came in time; missing: process 1 (127.0.0.1:" in done.stderr


@pytest.mark.full
def test_with_a_range_it_goes_on_with_those_that_are_left(tmp_path, monkeypatch):
    code, out = launch(
        tmp_path,
        "--processes=1:2",
        "--max-restarts=1",
        "strategy.name=multi_worker",
        config=CONFIG,
        failpoints=["process=1:step=after:kill@24"],  # the 17th that trains; the others evaluate
    )
    assert code == 0, out
    assert "[0] global batch 16 = 2 replicas x 8" in out
    assert "[0] global batch 16 = 1 replica x 16" in out
    assert re.search("going on from step (8|16) of 24", out), out
    monkeypatch.chdir(tmp_path)
    assert main(["run", "toy.yaml", "name=other"]) == 0
    assert_alike(rows_of(tmp_path), rows_of(tmp_path, "other"))


@pytest.mark.full
def test_an_error_that_all_meet_ends_each_with_its_code_and_no_word_of_a_loss(tmp_path):
    code, out = launch(tmp_path, "strategy.name=multi_worker", "task.options.poison_row=40", config=CONFIG)
    assert code == 1, out
    for process in (0, 1):
        assert f"[{process}] jdist: step 2 was not applied: the loss is NaN or infinite." in out
    assert "lost" not in out
    assert "Traceback" not in out
    assert last_save(tmp_path)["step"] == 1


def test_an_evaluator_evaluates_each_checkpoint_once_and_ends_with_the_job(tmp_path):
    code, out = launch(tmp_path, "--evaluator", "strategy.name=multi_worker", config=CONFIG)
    assert code == 0, out
    lines = (tmp_path / "runs/toy/eval.jsonl").read_text().splitlines()
    measured = {row["step"]: row for row in map(json.loads, lines)}
    assert len(measured) == len(lines)
    assert list(measured)[-1] == 24
    for row in rows_of(tmp_path):
        if row["step"] in measured and "eval/loss" in row:
            assert measured[row["step"]]["loss"] == pytest.approx(row["eval/loss"], rel=1e-5)
