"""The drawings are what their script draws."""

import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "drawings"
DRAWINGS = {draw.__name__: draw for draw in runpy.run_path(str(FOLDER / "draw.py"))["DRAWINGS"]}


def test_each_file_has_its_function():
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(DRAWINGS)


@pytest.mark.parametrize("name", sorted(DRAWINGS))
def test_a_file_is_what_its_function_draws(name):
    drawn = DRAWINGS[name]().svg()
    assert (FOLDER / f"{name}.svg").read_text() == drawn, "run: python docs/drawings/draw.py"
    assert ET.fromstring(drawn).find("{http://www.w3.org/2000/svg}title").text
