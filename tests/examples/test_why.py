"""The programs of docs/why.md: all ways give the same losses, and the page shows the programs and what they print."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHY = ROOT / "examples" / "why"
PAGE = (ROOT / "docs" / "why.md").read_text()
LOSSES = "epoch 0: loss 1.41450\nepoch 1: loss 0.06183\n"
needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed here: make test-loaders"
)


def printed(name):
    return subprocess.run(
        [sys.executable, f"{name}.py"], cwd=WHY, capture_output=True, text=True, check=True, timeout=300
    ).stdout


@pytest.mark.parametrize(
    "name", ["plain_jit", "by_shard_map", "with_jdist", pytest.param("with_tf", marks=needs_tensorflow)]
)
def test_every_way_gives_the_same_losses(name):
    assert printed(name) == LOSSES


def test_the_page_shows_what_the_mistakes_do():
    assert f"```text\n{printed('silent')}```" in PAGE


@pytest.mark.parametrize("name", ["with_jdist", "plain_jit"])
def test_the_page_shows_the_program(name):
    assert f'```python title="examples/why/{name}.py"\n{(WHY / name).with_suffix(".py").read_text()}```' in PAGE


def test_lines_of_code_are_those_of_the_programs():
    rows = re.findall(r"why/(\w+)\.py\)[^|]*\| (\d+) \|", PAGE)
    assert len(rows) == 4
    for name, lines in rows:
        text = (WHY / f"{name}.py").read_text().splitlines()
        assert int(lines) == sum(bool(line.strip()) for line in text[1:]), name
