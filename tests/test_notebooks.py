"""Every notebook runs from top to bottom, each cell twice in a row, as people do.

Those that use the TPU compiler take long, and run by default once. What their cells show is stored, for those who read
them where nothing runs.
"""

import importlib.metadata
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from packaging.requirements import Requirement

from tests.by_default import some
from tests.children import without_devices

FOLDER = Path(__file__).parent.parent / "notebooks"
sys.path.append(str(FOLDER))
from store_outputs import DIGEST, digest  # noqa: E402  a script, of no package

NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
SLOW = ["2_cloud_tpu", "5_plan_4096_chips"]  # they use the TPU compiler
QUICK = [name for name in NAMES if name not in SLOW]


@pytest.mark.parametrize(
    ("name", "times"),
    [*((name, 1) for name in SLOW), *some([(name, 2) for name in NAMES], [(name, 2) for name in QUICK])],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jupyter_client's own, in this process
@pytest.mark.timeout(900)  # one cell compiles 175 s of CPU, which on a busy machine is more than 300 s
def test_every_cell_runs(name: str, times: int, tmp_path: Path):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    cells = []
    for cell in notebook.cells:
        cells += [cell.copy() for _ in range(times)] if cell.cell_type == "code" else [cell]
    for i, cell in enumerate(cells):
        cell["id"] = f"cell-{i}"
    notebook.cells = cells
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=without_devices())
    errors = [o for cell in cells for o in cell.get("outputs", []) if o.output_type == "error"]
    assert not errors


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_stored(name: str):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    again = "run `make notebooks`, which stores what the cells show now"
    assert notebook.metadata.get(DIGEST) == digest(notebook), again
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), again
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    for output in outputs:
        assert output.output_type != "error"
        for kind, data in output.get("data", {"text": output.get("text")}).items():
            assert len(data) < 60_000, "keep pictures and tables small: every version stays in the repository"
            if kind != "image/png":
                assert not re.search(r"(?<![\w.:/<])/[A-Za-z]\w*/\w", data), "no paths of a machine"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_at_most_is_read_between_cells(name: str):
    cells = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells
    texts = "\n".join(cell.source if cell.cell_type == "markdown" else "\f" for cell in cells).split("\f")
    assert max(len(text.split()) for text in texts) <= 120


def test_cells_that_changed_are_noticed():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1"), nbformat.v4.new_markdown_cell("a")])
    before = digest(notebook)
    notebook.cells[1].source = "b"
    assert digest(notebook) == before  # text has no outputs
    notebook.cells[0].source = "2"
    assert digest(notebook) != before


def installs(name: str) -> list[list[str]]:
    """The calls of `%pip` of a notebook's first cell, in a Python that has jdist and in one that has not."""
    cells = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells
    source = TransformerManager().transform_cell(next(cell.source for cell in cells if cell.cell_type == "code"))
    found: list[list[str]] = []

    class Shell:
        def run_line_magic(self, magic: str, line: str) -> None:
            found.append([magic, *shlex.split(line.format(**names))])

    names: dict = {"get_ipython": Shell}
    for module in ("jdist", "jdist_that_is_missing"):
        exec(source.replace('find_spec("jdist")', f'find_spec("{module}")'), names)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_first_cell_installs_jdist_where_it_is_missing(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(FOLDER)
    ((*command, requirement),) = installs(name)
    wanted = Requirement(requirement)
    assert command == ["pip", "install", "--quiet"]
    urls = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"].get("urls")
    clone = FOLDER.parent.as_uri()  # until the repository has a public address: docs/site/set_address.py
    assert (wanted.name, wanted.url) == ("jdist", clone if urls is None else f"git+{urls['Source']}")
    assert {"examples"} <= wanted.extras <= set(importlib.metadata.metadata("jdist").get_all("Provides-Extra"))


def test_pip_takes_what_the_first_cell_installs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(FOLDER)
    ((*_, asked),) = installs(NAMES[0])
    requirement = f"jdist[{','.join(Requirement(asked).extras)}] @ {FOLDER.parent.as_uri()}"
    offline = ["--dry-run", "--ignore-installed", "--no-deps", "--no-index", "--no-build-isolation"]
    command = [sys.executable, "-m", "pip", "install", *offline, requirement]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert "Would install jdist-" in ended.stdout, ended.stderr
