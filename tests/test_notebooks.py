"""Every notebook runs from top to bottom, each cell twice in a row, as people do."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jupyter_client's own, in this process
def test_every_cell_runs_twice(path: Path, tmp_path: Path):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit notebooks without outputs"
    cells = []
    for cell in notebook.cells:
        cells += [cell, cell.copy()] if cell.cell_type == "code" else [cell]
    for i, cell in enumerate(cells):
        cell["id"] = f"cell-{i}"
    notebook.cells = cells
    as_a_user_has_it = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # else eight devices
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=as_a_user_has_it)
    errors = [o for cell in cells for o in cell.get("outputs", []) if o.output_type == "error"]
    assert not errors
