"""Which Python `make run` and `make test` take; make only says what it would do."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HERE = platform.python_version()

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def fake_python(path, version):
    """A program that gives `version` for its version, whatever it is asked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def plan(tmp_path):
    """What make would run with an environment of some Python version, or none, in the folder."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)

    def dry_run(*arguments, there=None, stamped=True, target="lint"):
        if there is not None:
            fake_python(tmp_path / ".venv" / "bin" / "python", there)
            if stamped:
                for stamp in (".core", ".installed"):
                    (tmp_path / ".venv" / stamp).touch()
        command = ["make", "--dry-run", target, *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True, env={"PATH": "/usr/bin:/bin"}
        )
        return done.stdout

    return dry_run


def test_an_environment_is_made_if_there_is_none(plan):
    assert "python3 -m venv --clear .venv" in plan()
    assert f"{sys.executable} -m venv --clear .venv" in plan(f"PYTHON={sys.executable}")


def test_without_a_wish_the_environment_that_is_there_serves(plan):
    said = plan(there="3.99.1")
    assert "venv --clear" not in said
    assert "pip install" not in said
    assert ".venv/bin/ruff check ." in said


def test_an_environment_of_the_wished_version_serves(plan):
    assert "venv --clear" not in plan(f"PYTHON={sys.executable}", there=HERE)


def test_an_environment_of_another_version_is_made_anew(plan):
    said = plan(f"PYTHON={sys.executable}", there="3.99.1")
    assert f"{sys.executable} -m venv --clear .venv" in said
    assert "pip install" in said


def test_a_python_that_is_not_there_is_not_passed_over(plan):
    assert "no_such_python -m venv" in plan("PYTHON=no_such_python", there=HERE)


def test_a_python_that_does_not_start_is_named(tmp_path):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shim = tmp_path / "bin" / "python3.99"  # as pyenv's of a version that is not the current one
    shim.parent.mkdir()
    shim.write_text("#!/bin/sh\necho 'python3.99: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    for python in (shim, "no_such_python"):
        command = ["make", "lint", f"PYTHON={python}"]
        environment = {"PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, env=environment
        )
        assert done.returncode != 0
        assert (
            done.stdout
            == f"PYTHON={python}: not found, or it does not start. Give the path of a Python 3.11 or newer.\n"
        )


def test_what_is_not_installed_yet_is_without_a_new_environment(plan):
    said = plan(there="3.99.1", stamped=False)
    assert "venv --clear" not in said
    assert "pip install" in said


def test_a_run_installs_what_it_needs_and_the_tests_the_rest(plan):
    run, lint = plan(target="run"), plan(target="lint")
    assert ("'.[examples]'" in run, "'.[dev]'" in run) == (True, False)
    assert lint.index("'.[examples]'") < lint.index("'.[dev]'")


def test_the_quick_tests_reach_every_room(plan):
    paths = [word for word in plan(there=HERE, target="quick").split() if word.startswith("tests/")]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    rooms = {path.parent.name for path in (ROOT / "jdist").glob("*/__init__.py")}
    missing = rooms - {path.split("/")[1] for path in paths} - {"cli"}  # whose tests start the command
    assert not missing, f"add a file of tests to QUICK in the Makefile for {', '.join(sorted(missing))}"


def test_the_error_of_a_python_that_does_not_start_is_shown(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    shim = fake_python(tmp_path / "bin" / "python3.99", "")
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.99: these versions have it: 3.99.1' >&2\nexit 127\n")
    done = subprocess.run(
        ["make", "run", f"PYTHON={shim}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode != 0
    assert "these versions have it: 3.99.1" in done.stderr
