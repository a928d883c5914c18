"""The examples of the pages on input print what the pages show."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

import jdist
from tests.docs.test_guides import run

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "input.md").read_text()
FORMATS, LIBRARIES = (DOCS / "input_formats.md").read_text().split("## Formats\n")[1].split("\n## ")
SECTIONS = dict(re.findall(r"^### (.*?)\n(.*?)(?=^### |\Z)", FORMATS, re.DOTALL | re.MULTILINE))
SECTIONS["Datasets of other libraries"] = LIBRARIES
NEEDS = {
    "ArrayRecord": ("grain", "array_record"),
    "Parquet": ("pyarrow",),
    "Hugging Face": ("datasets",),
    "PyTorch": ("torch", "torchdata"),
    "WebDataset": ("webdataset", "PIL"),
    "Images in a folder": ("PIL",),
    "Packing": ("grain",),
    "Datasets of other libraries": (),
}


def test_the_examples_of_the_guide_give_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("input.md", GUIDE, {}) > 20


def test_every_block_is_an_example_and_every_format_is_tested():
    assert (GUIDE + FORMATS + LIBRARIES).count("```pycon") == (GUIDE + FORMATS + LIBRARIES).count("```") // 2
    assert list(SECTIONS) == list(NEEDS)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own call
# webdataset leaves its files to the garbage collector to close.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("section", NEEDS)
def test_the_example_of_a_format_gives_what_it_shows(section, tmp_path, monkeypatch):
    missing = [name for name in NEEDS[section] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed; `make test-loaders` runs the example of {section}")
    monkeypatch.chdir(tmp_path)
    assert (
        run(
            "input_formats.md",
            SECTIONS[section],
            {"np": np, "jdist": jdist, "strategy": jdist.mirrored(["cpu:0", "cpu:1"])},
        )
        >= 3
    )
