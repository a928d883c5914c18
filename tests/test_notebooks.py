"""Every notebook runs from top to bottom, each cell twice in a row, as people do.

Those that use the TPU compiler take long, and run by default once.
"""

import os
from pathlib import Path

import nbformat
import pytest
from by_default import some
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
SLOW = ["2_cloud_tpu", "5_plan_4096_chips"]  # they use the TPU compiler
QUICK = [name for name in NAMES if name not in SLOW]


@pytest.mark.parametrize(
    ("name", "times"),
    [*((name, 1) for name in SLOW), *some([(name, 2) for name in NAMES], [(name, 2) for name in QUICK])],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jupyter_client's own, in this process
def test_every_cell_runs(name: str, times: int, tmp_path: Path):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit notebooks without outputs"
    cells = []
    for cell in notebook.cells:
        cells += [cell.copy() for _ in range(times)] if cell.cell_type == "code" else [cell]
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
