"""docs/pictures.md: its pictures are what its script draws."""

import importlib.util
import re
import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from jdist.cli.main import main
from tests.pictures import check_picture

DOCS = Path(__file__).parents[2] / "docs"
FOLDER = DOCS / "drawings" / "pictures"
GUIDE = (DOCS / "pictures.md").read_text()
SCRIPT = runpy.run_path(str(FOLDER / "draw.py"))
PICTURES = {picture.__name__: picture for picture in SCRIPT["PICTURES"]}
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu describes TPUs")


def test_each_picture_is_on_the_page_and_whole():
    files = {path.stem for path in FOLDER.glob("*.svg")}
    assert files == {*PICTURES, "plan"} == set(re.findall(r"\]\(drawings/pictures/(\w+)\.svg\)", GUIDE))
    for name in files:
        check_picture((FOLDER / f"{name}.svg").read_text())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[needs_libtpu] if name == "show_chips" else []) for name in PICTURES]
)
def test_a_file_is_what_its_function_draws(name):
    assert (FOLDER / f"{name}.svg").read_text() == PICTURES[name](), "run: python docs/drawings/pictures/draw.py"


@pytest.mark.full  # it compiles a step of 6.4 billion parameters; tests/plan/test_picture.py draws plans by default
@needs_libtpu
def test_the_plan_is_what_its_command_draws(tmp_path, capsys):
    arguments = [*SCRIPT["PLAN"][:-1], str(tmp_path / "plan.svg")]
    assert f"jdist {' '.join(arguments[:-1])} plan.svg" in GUIDE
    assert main(arguments) == 0

    def form(path: Path) -> list[str]:
        # The sizes of temporaries and program, and with them the total, belong to one version of the compiler.
        texts = [node.text for node in ET.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text")]
        return [re.sub(r"[\d.,]+ (GiB|MiB|KiB|B|ms|us|s)\b|[\d.]+%", "~", text) for text in texts]

    assert set(form(FOLDER / "plan.svg")) == set(form(tmp_path / "plan.svg"))
