"""What the tests of whole runs share."""

import pytest
from toy_regression import CONFIG

from jdist.cli.main import main


@pytest.fixture
def jdist_run(tmp_path, monkeypatch, capfd):
    """`jdist run` in an empty folder: `(overrides) -> (exit code, standard output, standard error)`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.yaml").write_text(CONFIG)

    def run(*overrides):
        code = main(["run", "toy.yaml", *overrides])
        return code, *capfd.readouterr()

    return run
