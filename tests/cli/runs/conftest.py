"""What the tests of run folders share: the toy task of tests/experiment, in an empty folder."""

import pytest
import toy_regression

from jdist.cli.main import main


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
