"""What a run refuses before it begins: wrong names, options and numbers, each with its key, value and origin."""

import os
from pathlib import Path

import numpy as np
import pytest

SCHEDULE = (
    "train.optimizer.learning_rate="
    "{schedule: warmup_cosine_decay_schedule, init_value: 0.0, peak_value: 0.1, warmup_steps: 9}"
)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.make=toy_regresion:make"], "task.make: no module 'toy_regresion'; it must be installed, or lie in"),
        (["task.make=toy_regression:mak"], "has no function 'mak'. Did you mean make? (override task.make="),
        (["task.make=toy_regression:number"], "has no function 'number'"),
        (["task.make=toy_regression:not_a_task"], 'returned "dict", not a jdist.tasks.Task'),
        (["task.options.row=3"], "task.options.row: toy_regression:make has no such option (override"),
        (
            ["task.options={rows: x}"],
            'task.options.rows: "x" is not a whole number (override task.options={rows: x}).\n',
        ),
        (
            ["task={make: 'jdist.tasks.arrays:make', options: {path: none.npz}}"],
            "task.options.path: the file {folder}/none.npz does not exist (override task={make",
        ),
        (
            ["task.options.features=0"],
            "task.options.features: 0 is not one or more (override task.options.features=0). Say",
        ),
        (["task.make=toy_regression:broken"], "task.make: no data today (override task.make=toy_regression:broken).\n"),
        (
            ["train.global_batch=105"],
            "105 is more than twice the 52 rows that there are to train on: most of every step",
        ),
        (
            [f"train.global_batch={10**15}"],
            "(override train.global_batch=1000000000000000). For all rows in every step say 52",
        ),
        ([f"train.global_batch={10**30}"], "than twice the 52 rows"),
        (["strategy.devices=3"], "strategy.devices: 3 is not a list or null (override strategy.devices=3)"),
        (
            [SCHEDULE, "train.steps=5"],
            "train.steps: a run of 5 steps is too short for the schedule warmup_cosine_decay_schedule of "
            "train.optimizer.learning_rate, where warmup_steps is 9: it needs 10 or more (override train.steps=5 and override "
            "train.optimizer.learning_rate=",
        ),
        (
            [SCHEDULE, "train.steps=null", "train.epochs=2"],
            "train.epochs: a run of 8 steps is too short for the schedule",
        ),
        (["strategy.name=mirored"], 'no strategy "mirored" (override strategy.name=mirored). Did you mean mirrored?'),
        (["strategy.tranform=jit"], "strategy mirrored has no such option (override strategy.tranform=jit). Did you"),
        (["strategy.transform=jot"], "(override strategy.transform=jot)"),
        (
            ["train.accumulate=3"],
            "train.accumulate: a replica's 2 rows cannot be worked through in 3 equal parts: "
            "train.global_batch is 16, over 8 replicas (override train.accumulate=3). Say train.global_batch=24, or "
            "train.accumulate=2.",
        ),
        (["train.optimizer.name=adamv"], 'optax has no optimizer "adamv" (override train.optimizer.name=adamv)'),
        (["train.optimizer.learning_rate={schedule: cosine}"], 'unknown schedule "cosine" '),
        (["train.optimizer.learning_rate={schedule: cosine}"], "Did you mean cosine_decay_schedule?"),
        (["train.steps_per_call=5"], "5 does not divide the 24 steps of the run"),
        (
            ["checkpoint.best=eval/accuracy"],
            'no metric "eval/accuracy" (override checkpoint.best=eval/accuracy). It has: eval/close, eval/loss',
        ),
        (["log.folder=toy.yaml"], "toy.yaml/toy: cannot be written: Not a directory"),
        (["log.folder=/dev/full"], "/dev/full/toy: cannot be written: Not a directory"),
    ],
)
def test_what_cannot_be_is_refused_without_a_traceback(jdist_run, overrides, message):
    code, _, err = jdist_run(*overrides)
    assert code == 2
    assert err.startswith("jdist: ")
    assert message.replace("{folder}", str(Path.cwd())) in err
    assert "Traceback" not in err
    assert ".." not in err
    assert err.count("\n") == 1


def test_problems_of_names_and_options_come_all_at_once(jdist_run):
    code, _, err = jdist_run("task.options.row=3", "strategy.name=x", "train.optimizer.b1=x", "train.optimizer.z=1")
    assert code == 2
    assert err.startswith("jdist: 4 problems with toy.yaml:\n")


def test_of_a_run_whose_length_is_not_known_no_schedule_is_too_short(jdist_run):
    code, _, err = jdist_run(SCHEDULE, "train.steps=null", "train.epochs=2", "task.options.features=0")
    assert code == 2
    assert err.startswith("jdist: task.options.features: 0 is not one or more")
    assert "too short" not in err


def test_a_task_whose_module_needs_something_else_says_what(jdist_run, tmp_path):
    (tmp_path / "needs_more.py").write_text("import not_there_at_all\n")
    code, _, err = jdist_run("task.make=needs_more:make")
    assert code == 2
    assert "needs_more needs the module 'not_there_at_all', which is not installed" in err


def test_a_traceback_can_be_asked_for(jdist_run, monkeypatch):
    monkeypatch.setenv("JDIST_TRACEBACK", "1")
    with pytest.raises(ValueError, match="no such key"):
        jdist_run("train.step=3")


def test_a_path_that_cannot_be_read_is_blamed_on_its_option(jdist_run):
    np.save("rows.npy", np.ones(3))
    code, _, err = jdist_run("task.options.file=data/../row.npy")
    assert code == 2
    assert err == (
        f"jdist: task.options.file: {os.getcwd()}/data/../row.npy: No such file or directory "
        "(override task.options.file=data/../row.npy).\n"
    )
    code, _, err = jdist_run("task.options.file=row.npy")
    assert err.endswith(f"(override task.options.file=row.npy). Did you mean {os.getcwd()}/rows.npy?\n")
    with pytest.raises(FileNotFoundError):  # of no option
        jdist_run("task.make=toy_regression:reads")


def test_a_schedule_that_is_longer_than_the_run_is_told_by_a_dry_run_too(jdist_run):
    schedule = "{schedule: cosine_decay_schedule, init_value: 0.1, decay_steps: 10000}"
    with pytest.warns(UserWarning, match=r"learning_rate\.decay_steps is 10,000, and the run has 24 steps"):
        code, *_ = jdist_run(f"train.optimizer={{name: sgd, learning_rate: {schedule}}}", "--dry-run")
    assert code == 0
