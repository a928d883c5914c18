"""The drawings and pictures of the documentation are what their scripts draw."""

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
DRAWINGS = {draw.__name__: draw for draw in runpy.run_path(str(DOCS / "drawings" / "draw.py"))["DRAWINGS"]}
DRAWN = {f"drawings/{name}.svg": lambda draw=draw: draw().svg() for name, draw in DRAWINGS.items()}
DRAWN |= {f"drawings/pictures/{name}.svg": draw for name, draw in PICTURES.items()}
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu describes TPUs")


def test_each_picture_is_on_the_page_and_whole():
    files = {path.stem for path in FOLDER.glob("*.svg")}
    assert files == {*PICTURES, "plan"} == set(re.findall(r"\]\(drawings/pictures/(\w+)\.svg\)", GUIDE))
    for name in files:
        check_picture((FOLDER / f"{name}.svg").read_text())


def test_each_drawing_has_its_function():
    assert {path.stem for path in (DOCS / "drawings").glob("*.svg")} == set(DRAWINGS)


@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=[needs_libtpu] if "show_chips" in file else []) for file in sorted(DRAWN)]
)
def test_a_file_is_what_its_function_draws(file):
    drawn = DRAWN[file]()
    assert (DOCS / file).read_text() == drawn, f"run: python docs/{Path(file).parent}/draw.py"
    assert ET.fromstring(drawn).find("{http://www.w3.org/2000/svg}title").text


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
