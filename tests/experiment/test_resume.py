"""Which run folders may be gone on from; whole runs that do so are in test_run.py."""

import json

import pytest

from jdist.errors import ConfigError
from jdist.experiment.load import load
from jdist.experiment.record import RunFolder
from jdist.experiment.resume import check_same_run
from jdist.experiment.validate import validate

CONFIG = """\
name: toy
task: {make: "toy_regression:make"}
train: {global_batch: 16, steps: 24, optimizer: {name: adamw, learning_rate: 1e-2}}
"""
ROW = json.dumps({"step": 4, "loss": 0.5}) + "\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run folder with nothing but its config, as a run leaves it that is killed at once."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.yaml").write_text(CONFIG)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(CONFIG)
    return RunFolder(tmp_path / "run")


def check(folder, *overrides):
    document = load("toy.yaml", overrides)
    check_same_run(folder, validate(document).model_dump(), document)


def test_rows_of_another_run_are_not_gone_on_from_though_it_saved_no_checkpoint(folder):
    folder.metrics.write_text(ROW)
    assert not folder.has_checkpoints()
    with pytest.raises(ConfigError) as caught:
        check(folder, "train.seed=1")
    assert str(caught.value).splitlines() == [
        f"{folder.path}: holds a run with a different config:",
        "  train.seed: 0 there, 1 now (override train.seed=1)",
        "Go on with the config as it was, take another name, or start again with --fresh, which keeps the old folder.",
    ]
    check(folder)
    check(folder, "train.steps=48", "strategy.name=one_device", "log.every=1")  # what may change


def test_a_checkpoint_of_another_run_is_not_gone_on_from(folder):
    (folder.checkpoints / "step_00000008_save_00001").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"train\.global_batch: 16 there, 8 now"):
        check(folder, "train.global_batch=8")


def test_a_folder_in_which_nothing_was_measured_or_saved_may_take_another_config(folder):
    folder.metrics.write_text("")
    (folder.checkpoints / ".step_00000008.partial").mkdir(parents=True)
    check(folder, "train.seed=1")
    folder.config.unlink()
    folder.metrics.write_text(ROW)
    check(folder, "train.seed=1")
