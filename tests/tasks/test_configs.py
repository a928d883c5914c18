"""Each file in configs/ says what it shows, and names a task, options and an optimizer that exist."""

import importlib
from pathlib import Path

import pytest

from jdist.experiment.load import load
from jdist.experiment.optimizer import check_optimizer, fill_lengths
from jdist.experiment.validate import validate
from jdist.support.signature import check_options

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def test_the_configs_of_the_bundled_tasks_are_there():
    assert {"digits", "mnist_idx", "text", "arrays"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_valid_and_opens_with_its_summary(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    header = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    for entry in ("Shows:", "Command:", "Time:", "Result:"):
        assert any(line.startswith(f"# {entry}") for line in header), entry
    document = load(str(path), ())
    config = validate(document)
    module, _, function = config.task.make.partition(":")
    make = getattr(importlib.import_module(module), function)
    assert not list(check_options(make, config.task.options, called=config.task.make, key=("task", "options")))
    section = fill_lengths(config.model_dump()["train"]["optimizer"], steps=config.train.steps or 1000)
    assert not list(check_optimizer(section, global_batch=config.train.global_batch))
