"""Which run folders may be gone on from; whole runs that do so are in test_run.py."""

import json
from types import SimpleNamespace

import pytest
from toy_regression import CONFIG

from jdist.errors import ConfigError
from jdist.experiment.load import load
from jdist.experiment.record import RunFolder
from jdist.experiment.resume import check_same_config, check_same_run
from jdist.experiment.validate import validate

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
        "Go on with the old config, choose another name, or start again with --fresh, which keeps the old folder.",
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


def test_processes_with_different_configs_are_refused():
    values = {"name": "toy", "train": {"seed": 0, "steps": 5}, "platform": {"cpu_devices": 1}}
    other = {"name": "toy", "train": {"seed": 5, "steps": 5}, "platform": {"cpu_devices": 2}}
    texts = []
    first = SimpleNamespace(exchange=lambda what, mine, timeout_s: texts.append(mine) or [mine])
    check_same_config(values, first, 1)
    check_same_config(values, SimpleNamespace(exchange=lambda what, mine, timeout_s: [mine, *texts]), 1)
    with pytest.raises(ConfigError, match=r"differ: train\.seed is 0 on process 0, and 5 on process 1\. Start all"):
        check_same_config(other, SimpleNamespace(exchange=lambda what, mine, timeout_s: [*texts, mine]), 1)
