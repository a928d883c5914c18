"""`jdist run --dry-run`: what a run would be refused for is refused, and nothing is left behind."""

import os
import re
from pathlib import Path

import pytest

from jdist.support.words import size


def everything():
    return sorted(str(path) for path in Path().rglob("*"))


def test_it_says_what_a_run_would_be_and_writes_nothing(jdist_run):
    before = everything()
    code, out, err = jdist_run("--dry-run", "train.steps=8")
    assert (code, err) == (0, "")
    assert re.search(r"steps: 8 +# override train\.steps=8", out)
    assert "global batch 16 = 8 replicas x 2" in out
    assert "parameters: 4 numbers in 2 arrays, 16 B" in out
    assert "batch: mask bool[16], x float32[16, 3], y float32[16]" in out
    assert re.search(r"train step: compiled in \S+ s, needs \S+ \S+ of each device", out)
    assert "evaluation: compiled" in out
    assert "a run would write runs/toy\ndry run: all is well" in out
    assert everything() == before


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("checkpoint.best=eval/clsoe", 'the task\'s evaluation has no metric "eval/clsoe"'),
        ("train.optimizer.b1=x", "train.optimizer.b1"),
        ("strategy.transform=jot", "\"jot\" is not 'shard_map', 'pmap' or 'jit'"),
        ("task.options.features=0", "0 is not one or more"),
        ("train.steps_per_call=5", "5 does not divide the 24 steps"),
    ],
)
def test_what_a_run_would_be_refused_for_is_refused(jdist_run, override, said):
    before = everything()
    code, _, err = jdist_run("--dry-run", override)
    assert code == 2
    assert said in err
    assert everything() == before


def test_a_folder_that_a_run_could_not_write_is_refused(jdist_run):
    Path("runs/toy").mkdir(parents=True)
    Path("runs/toy/thesis.tex").write_text("mine")
    Path("file").write_text("")
    before = everything()
    for override, said in [
        ("train.steps=8", "runs/toy: not a run folder: it holds thesis.tex but no config.yaml"),
        ("log.folder=/proc/here", "/proc/here/toy: cannot be written: "),
        ("log.folder=file", "file/toy: cannot be written: Not a directory"),
    ]:
        code, _, err = jdist_run("--dry-run", override)
        assert (code, said in err) == (2, True), err
    assert everything() == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("{local_workers: 0}", "`local_workers` is 0; it must be a whole number, 1 or more"),
        ("{local_ps: 1, ps_replicas: 2}", "`ps_replicas` is 2 and there is 1 parameter server"),
        ("{backup_workers: 1}", '`backup_workers` is for `mode="sync"`'),
        ("{mode: sync, backup_workers: 2}", "`backup_workers` is 2, and there are 2 workers"),
        ("{mode: sync, devices_per_worker: 2}", "`devices_per_worker` is 2, and synchronous mode has one gradient"),
    ],
)
def test_options_of_a_parameter_server_are_looked_at_without_one(jdist_run, monkeypatch, options, said):
    monkeypatch.setattr("subprocess.Popen", None)  # nothing is started
    code, _, err = jdist_run("--dry-run", f"strategy={options.replace('{', '{name: parameter_server, ')}")
    assert code == 2
    assert said in err


def test_it_looks_at_the_run_that_is_there(jdist_run):
    assert jdist_run("train.steps=8")[0] == 0
    stamps = {path: os.stat(path).st_mtime_ns for path in everything()}
    assert "a run would go on from the checkpoints in runs/toy" in jdist_run("--dry-run")[1]
    code, _, err = jdist_run("--dry-run", "train.seed=1")
    assert code == 2
    assert "holds a run with a different config" in err
    assert "a run would write runs/toy" in jdist_run("--dry-run", "train.seed=1", "--fresh")[1]
    assert {path: os.stat(path).st_mtime_ns for path in everything()} == stamps


def test_steps_of_one_call_and_strategies_without_devices_here(jdist_run):
    assert "x float32[4, 16, 3]" in jdist_run("--dry-run", "train.steps_per_call=4")[1]
    code, out, _ = jdist_run("--dry-run", "strategy.name=parameter_server")
    assert code == 0
    assert "no server is started" in out


def test_a_size_in_the_unit_that_suits_it():
    assert [size(n) for n in (12, 2048, 3 << 20, 5 << 40)] == ["12 B", "2.00 KiB", "3.00 MiB", "5,120.00 GiB"]
