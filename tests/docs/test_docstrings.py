"""The examples of the docstrings give what they show, and the API pages have every public name."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import jdist

ROOT = Path(__file__).parents[2]
API = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md")))
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for folder in ("jdist", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>> " in path.read_text()
]
ROOMS = ("callbacks", "cluster", "data", "metrics", "ps", "reduction", "tasks", "train", "weights")


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module(name, tmp_path, monkeypatch):
    for read in ("configs", "examples", "jdist"):  # others write
        (tmp_path / read).symlink_to(ROOT / read)
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def public_names():
    yield from (f"jdist.{name}" for name in jdist.__all__ if name not in (*ROOMS, "errors", "nnx", "typing"))
    for room in ROOMS:
        module = importlib.import_module(f"jdist.{room}")
        # A room without `__all__` names what it is for by `import x as x`.
        listed = re.findall(r"import \w+ as (\w+)", Path(module.__file__).read_text())
        yield from (f"jdist.{room}.{name}" for name in getattr(module, "__all__", listed))


def test_the_api_pages_have_every_public_name():
    shown = re.findall(r"^::: ([\w.]+)$", API, re.MULTILINE)
    assert sorted(set(shown)) == sorted(shown)
    wanted = set(public_names())
    assert "jdist.data.from_arrays" in wanted
    assert "jdist.train.Checkpointer" in wanted
    missing = sorted(name for name in wanted - set(shown) if callable(_value(name)))
    assert not missing, f"write `::: NAME` into a page of docs/api/ for {', '.join(missing)}"


def _value(name):
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def test_every_public_name_has_a_docstring():
    values = {name: _value(name) for name in public_names()}
    documented = {name for name, value in values.items() if inspect.isfunction(value) or inspect.isclass(value)}
    assert len(documented) > 80
    assert not [name for name in documented if not values[name].__doc__]
