"""The probe for gloo's reduce-scatter says what this jaxlib does."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from jdist.support import xla

ROOT = Path(__file__).parents[2]


def test_sums_are_wrong_where_they_are_taken_for_wrong():
    """Fails where jdist avoids reduce-scatters for nothing, and where it does not avoid wrong ones."""
    program = Path(__file__).with_name("gloo_scatter.py")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=environ, check=True)
    assert done.stdout.splitlines()[-1] in (
        "wrong: True, taken for wrong: True",
        "wrong: False, taken for wrong: False",
    )


def test_some_jaxlib_that_jdist_supports_needs_it():
    """Fails once pyproject.toml asks for a jaxlib that sums rightly: `gloo_scatters_wrongly` and what asks it can go."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (allowed,) = [each.specifier for each in map(Requirement, project["dependencies"]) if each.name == "jaxlib"]
    oldest = min(each.version for each in allowed if each.operator == ">=")
    assert tuple(map(int, oldest.split("."))) < xla._GLOO_RIGHT_SINCE


def test_without_other_processes_nothing_is_avoided():
    assert not xla.gloo_scatters_wrongly()
