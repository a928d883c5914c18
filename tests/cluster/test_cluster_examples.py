"""The examples in the docstrings of jdist/cluster/ hold."""

import doctest
import importlib
from pathlib import Path

import pytest

import jdist.cluster

MODULES = sorted(path.stem for path in Path(jdist.cluster.__file__).parent.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("module", MODULES)
def test_examples(module):
    assert doctest.testmod(importlib.import_module(f"jdist.cluster.{module}")).failed == 0
