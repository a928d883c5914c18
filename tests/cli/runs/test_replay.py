"""`jdist run --replay`: a run once more, bit for bit, and what it says where it is not."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from jdist.cli.runs.replay import first_difference, state_difference

MATCHED = "matched: 6 rows of metrics and the 9 arrays of the state are equal bit for bit"


def edit(path, change):
    content = json.loads(Path(path).read_text())
    change(content)
    Path(path).write_text(json.dumps(content))


def test_a_run_that_was_stopped_and_went_on_is_repeated_in_one_go(jdist):
    assert jdist("run", "toy.yaml", "train.steps=8")[0] == 0
    assert jdist("run", "toy.yaml")[0] == 0
    starts = json.loads(Path("runs/toy/environment.json").read_text())["starts"]
    assert [(start["step"], start["total_steps"]) for start in starts] == [(0, 8), (8, 24)]
    code, out, err = jdist("run", "--replay", "runs/toy")
    assert (code, err) == (0, "")
    assert "train.steps: 8 there from step 0, 24 here" in out
    assert out.splitlines()[-1] == MATCHED
    assert Path("runs/toy.replay/metrics.jsonl").is_file()
    code, out, _ = jdist("run", "runs/toy", "--replay")  # again: the first replay is set aside
    assert code == 0
    assert "runs/toy.replay.1" in out


def test_it_says_first_what_is_not_as_it_was_and_in_the_end_what_differs(jdist):
    assert jdist("run", "toy.yaml", "strategy.name=one_device")[0] == 0
    edit("runs/toy/environment.json", lambda found: found["starts"][0]["environment"].update(jax="0.1"))
    edit("runs/toy/result.json", lambda found: found["state"].update({".params['w']": "other"}))
    rows = Path("runs/toy/metrics.jsonl").read_text().splitlines()
    changed = json.loads(rows[2]) | {"loss": 0.5}
    Path("runs/toy/metrics.jsonl").write_text("\n".join([*rows[:2], json.dumps(changed), *rows[3:]]) + "\n")
    code, out, _ = jdist("run", "--replay", "runs/toy")
    assert code == 1
    assert "  jax: 0.1 there, 0." in out
    assert "jax: 0.1 there" in out.partition("step  4/24")[0]
    last = out.splitlines()[-2:]
    assert last[0].startswith("differs: step 12: loss is 0.5 there, ")
    assert last[1].strip() == "state: 1 of 9 arrays, the first is .params['w']"


def test_the_source_of_a_task_is_kept_with_the_run(jdist):
    assert jdist("run", "toy.yaml", "train.steps=4")[0] == 0
    here = Path(__file__).parents[2] / "experiment" / "toy_regression.py"
    assert Path("runs/toy/source/toy_regression.py").read_bytes() == here.read_bytes()


def test_a_module_beside_the_task_is_kept_and_missed_where_it_has_changed(jdist, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("e_task.py").write_text("import e_helper, toy_regression\nmake = toy_regression.make\n")
    Path("e_helper.py").write_text("SCALE = 1\n")
    make = "task.make=e_task:make"
    assert jdist("run", "toy.yaml", make, "train.steps=4")[0] == 0
    assert sorted(os.listdir("runs/toy/source")) == ["e_helper.py", "e_task.py"]
    assert "the environment is that of the run" in jdist("run", "--replay", "runs/toy")[1]
    Path("e_helper.py").write_text("SCALE = 2\n")
    assert re.search(r"  task source: \w+ there, \w+ here", jdist("run", "--replay", "runs/toy")[1])
    said = "warning: the task's source has changed since then, and steps from here on are its: e_helper.py"
    assert said in jdist("run", "toy.yaml", make, "train.steps=8")[1]
    for name in ("e_task", "e_helper"):
        monkeypatch.delitem(sys.modules, name)


def test_what_cannot_be_repeated_is_refused(jdist):
    code, _, err = jdist("run", "--replay", "runs/none")
    assert (code, err.partition(":")[2].partition(":")[2].strip()[:33]) == (2, "not a run folder: it has no confi")
    assert jdist("run", "toy.yaml", "train.steps=8")[0] == 0
    code, _, err = jdist("run", "--replay", "runs/toy", "train.steps=9")
    assert code == 2
    assert "takes no overrides: leave out train.steps=9" in err
    assert jdist("run", "--replay", "--dry-run", "runs/toy")[0] == 2
    Path("runs/toy/result.json").unlink()
    code, _, err = jdist("run", "--replay", "runs/toy")
    assert code == 2
    assert "this run stopped before its 8 steps" in err
    Path("runs/toy/environment.json").write_text('{"starts": []}')
    assert "environment.json: missing, or lists no start of the run" in jdist("run", "--replay", "runs/toy")[2]
    Path("runs/toy/environment.json").unlink()
    assert "environment.json: missing, or lists no start of the run" in jdist("run", "--replay", "runs/toy")[2]


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        ([{"step": 1, "time_s": 1.0}], [{"step": 1, "time_s": 2.0}], []),
        ([{"step": 1}], [{"step": 1}, {"step": 2}], ["step 2: there is a row of metrics here alone"]),
        ([{"step": 1}, {"step": 3}], [{"step": 3}], ["step 1: there is a row of metrics there alone"]),
        ([{"step": 1, "a": 0.5}], [{"step": 1}], ["step 1: a is 0.5 there, None here"]),
    ],
)
def test_the_first_difference_is_named(there, here, said):
    assert first_difference(there, here) == said


def test_arrays_that_differ_or_are_missing_are_counted():
    assert state_difference({"a": "1", "b": "2"}, {"a": "1", "c": "2"}) == [
        "state: 2 of 3 arrays, the first is b",
    ]
