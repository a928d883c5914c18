"""`jdist runs`: lists and comparisons."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from jdist.cli.runs import show
from jdist.support.file_lock import hold


def test_it_lists_runs_and_compares_two(jdist):
    assert jdist("run", "toy.yaml")[0] == 0
    assert jdist("run", "toy.yaml", "name=fast", "log.folder=runs/more", "train.optimizer.learning_rate=0.1")[0] == 0
    code, out, err = jdist("runs")
    assert (code, err) == (0, "")
    header, fast, toy = out.splitlines()
    assert " ".join(header.split()) == "run task strategy step metric last best trained goodput status when"
    assert fast.split()[:5] == ["runs/more/fast", "toy_regression", "mirrored", "24/24", "close"]
    assert toy.split()[:1] == ["runs/toy"]
    assert "finished" in toy

    rows = [json.loads(line) for line in Path("runs/toy/metrics.jsonl").read_text().splitlines()]
    (listed,) = (run for run in json.loads(jdist("runs", "--json")[1]) if run["name"] == "toy")
    closes = [row["eval/close"] for row in rows if "eval/close" in row]
    assert (listed["last"], listed["best"]) == (closes[-1], max(closes))
    assert listed["metrics"]["eval/loss"] == rows[-1]["eval/loss"]
    assert len(jdist("runs", "runs/more")[1].splitlines()) == 2

    code, out, _ = jdist("runs", "toy", "runs/more/fast")
    assert code == 0
    assert out.splitlines()[:2] == [
        "config                          toy  fast",
        "train.optimizer.learning_rate  0.01   0.1",
    ]
    assert "the environments are alike" in out
    assert Path("runs/toy_and_fast.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(jdist("runs", "runs/toy", "runs/more/fast", "--json")[1])
    assert found["config"] == {"train.optimizer.learning_rate": [0.01, 0.1]}
    assert found["metrics"]["eval/loss"][0] == rows[-1]["eval/loss"]


def test_a_run_that_has_not_ended_is_running_or_stopped(jdist):
    assert jdist("run", "toy.yaml", "train.steps=8")[0] == 0
    folder = Path("runs/toy")
    (folder / "result.json").unlink()
    assert json.loads(jdist("runs", "--json")[1])[0]["status"] == "stopped"
    with hold(folder / ".lock"):
        assert json.loads(jdist("runs", "--json")[1])[0]["status"] == "running"
    for name in ("environment.json", "metrics.jsonl"):  # as a run of an older jdist, killed at once
        (folder / name).unlink()
    assert jdist("runs")[1].splitlines()[1].split()[3:7] == ["0/8", "close", "-", "-"]


def test_a_run_that_ended_with_an_error_has_failed(jdist):
    poisoned = ("task.options.poison_row=3", "name=poisoned")
    assert jdist("run", "toy.yaml", *poisoned)[0] == 1
    assert jdist("run", "toy.yaml", "checkpoint.best=eval/nothing", "name=refused")[0] == 2
    assert {run["name"]: run["status"] for run in json.loads(jdist("runs", "--json")[1])} == {
        "poisoned": "failed",
        "refused": "failed",
    }


def test_a_run_that_cannot_be_read_hides_no_other(jdist):
    assert jdist("run", "toy.yaml", "train.steps=4")[0] == 0
    table = jdist("runs", "runs")[1]
    config = Path("runs/toy/config.yaml").read_text()
    broken = {
        "a": ("config.yaml", "name: [", "runs/a/config.yaml:1: not valid YAML: "),
        "b": ("config.yaml", f"{config}colour: red\n", "colour: no such key"),
        "c": ("result.json", '{"step": 4, "sta', "runs/c/result.json: cannot be read: "),
        "d": ("metrics.jsonl", "nothing\n{}\n", "runs/d/metrics.jsonl:1: not a JSON object"),
        "e": ("environment.json", "[]", "runs/e/environment.json: not in the form that this jdist writes: "),
    }
    for name, (file, text, _) in broken.items():
        shutil.copytree("runs/toy", f"runs/{name}")
        Path("runs", name, file).write_text(text)
    code, out, err = jdist("runs", "runs")
    assert (code, err) == (0, "")
    assert out.startswith(table)
    found = {run["folder"]: run for run in json.loads(jdist("runs", "--json")[1])}
    assert found.pop("runs/toy")["status"] == "finished"
    for (name, (_, _, said)), folder in zip(broken.items(), found, strict=True):
        assert (folder, found[folder]["status"]) == (f"runs/{name}", "unreadable")
        assert said in found[folder]["reason"]
        assert f"{folder}: unreadable: {found[folder]['reason']}\n" in out
    shutil.rmtree("runs/toy")
    assert jdist("runs")[1] == out.removeprefix(table)  # with no table above


def test_what_is_not_there_is_said(jdist):
    code, _, err = jdist("runs")
    assert (code, err) == (2, "jdist: runs: no such folder. `jdist run CONFIG` writes its runs to runs/.\n")
    Path("runs").mkdir()
    assert jdist("runs")[1] == "no runs here\n"
    code, _, err = jdist("runs", "a", "b")
    assert code == 2
    assert "a: not a run folder" in err
    assert jdist("runs", "a", "b", "c")[0] == 2


def test_a_misspelt_run_is_told_the_nearest_one(jdist):
    assert jdist("run", "toy.yaml", "train.steps=8")[0] == 0
    for command in (("runs", "toi", "toy"), ("runs", "runs/toi"), ("run", "--replay", "runs/toi")):
        code, _, err = jdist(*command)
        assert (code, "Did you mean 'runs/toy'?" in err) == (2, True)


def test_lists_and_grids_need_no_jax():
    code = (
        "import sys, jdist.cli.runs.show, jdist.cli.runs.sweep, jdist.cli.runs.replay; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_long_values_are_shown_from_where_they_differ():
    a, b = show._texts(*([{"csv": {"path": "x" * 60}}, {"ema": {"decay": decay}}] for decay in (0.9, 0.99)))
    assert a.startswith("...")
    assert "0.9" in a
    assert "0.99" in b
