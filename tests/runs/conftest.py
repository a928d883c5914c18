"""What the tests of run folders share: the toy task of tests/experiment, in an empty folder."""

import sys
from pathlib import Path

import pytest

from jdist.cli.main import main

EXPERIMENT = Path(__file__).parents[1] / "experiment"
sys.path.insert(0, str(EXPERIMENT))

import toy_regression  # noqa: E402


@pytest.fixture
def jdist(tmp_path, monkeypatch, capfd):
    """`jdist` in an empty folder with toy.yaml: `(arguments) -> (exit code, standard output, standard error)`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.yaml").write_text(toy_regression.CONFIG)

    def call(*arguments):
        capfd.readouterr()
        code = main(arguments)
        return code, *capfd.readouterr()

    return call
