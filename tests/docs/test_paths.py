"""Every file that a document names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "BUILD_NOTES.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/RESULTS.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# A path with a folder, in the text as `jdist/loop/fit.py` or, below jdist/, `loop/fit.py`; or a link.
NAMED = re.compile(r"(?<![\w./{<-])((?:\w+/)+\w+\.(?:py|md|yaml|sh|ipynb))\b")
LINKED = re.compile(r"\]\((?!\w+:)([^)#\s]+)")
FOLDERS = {path.name for base in (ROOT, ROOT / "jdist") for path in base.iterdir() if path.is_dir()}


def missing(page: Path) -> set[str]:
    text = re.sub(r'title="[^"]+"|[\w/]+/NAME\.py', "", page.read_text())  # files that are yet to be written
    named = {path for path in NAMED.findall(text) if path.partition("/")[0] in FOLDERS}
    linked = {path for path in LINKED.findall(text) if not (page.parent / path).exists()}
    return linked | {
        path for path in named if not any((base / path).exists() for base in (ROOT, ROOT / "jdist", page.parent))
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_file_that_a_page_names_is_there(page: Path):
    assert missing(page) == set()


def test_a_file_that_has_moved_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("`jdist/errors.py` `core/strategy.py` jdist/gone.py `core/gone.py` [a](b.md) my_package/task.py")
    assert missing(page) == {"jdist/gone.py", "core/gone.py", "b.md"}
