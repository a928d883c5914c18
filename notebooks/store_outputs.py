"""Runs the notebooks and stores what their cells show, for those who read them where nothing runs: `make notebooks`."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import socket
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

from jdist.strategies.absent_plugins import quiet_environment

FOLDER = Path(__file__).parent
DIGEST = "sources_sha256"  # in a notebook's metadata: of the cells that its outputs are of


def digest(notebook: nbformat.NotebookNode) -> str:
    """Tells whether a notebook's code is what its outputs are of."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def of_this_machine(notebook: nbformat.NotebookNode) -> list[str]:
    """Says which names of this machine the outputs hold: they are for all to read."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = "\n".join(json.dumps(o.get("data", o) | {"image/png": ""}) for o in outputs)
    own = {socket.gethostname(), str(Path.home()), tempfile.gettempdir(), str(FOLDER.parent.resolve()), sys.prefix}
    return sorted(name for name in own if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", shown))


def shrink(notebook: nbformat.NotebookNode) -> None:
    """Draws pictures with fewer colours: curves need no more, and the repository keeps every version of them."""
    for data in (output.data for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output):
        if "image/png" in data:
            smaller = io.BytesIO()
            picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGB")
            picture.quantize(64).save(smaller, "png", optimize=True)
            data["image/png"] = base64.b64encode(smaller.getvalue()).decode()


def store(path: Path) -> None:
    """Runs a notebook from top to bottom, in an empty folder, and writes it back with its outputs.

    Args:
        path: the notebook.

    Raises:
        CellExecutionError: a cell failed; nothing is written.
        SystemExit: an output holds a name of this machine; nothing is written.
    """
    notebook = nbformat.read(path, as_version=4)
    metadata = notebook.metadata.copy()
    # Virtual devices are the notebook's to choose.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= quiet_environment(environment)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        client.execute(env=environment)
    if found := of_this_machine(notebook):
        sys.exit(f"{path}: its outputs hold {', '.join(found)}. Change the cell that shows it.")
    shrink(notebook)
    notebook.metadata = metadata | {DIGEST: digest(notebook)}
    nbformat.write(notebook, path)
    print(f"{path}: {path.stat().st_size / 1024:,.0f} KiB", flush=True)


if __name__ == "__main__":
    for each in map(Path, sys.argv[1:] or sorted(FOLDER.glob("*.ipynb"))):
        store(each)
