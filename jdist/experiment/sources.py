"""The source files that a run's task consists of."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path


def task_sources(make: str) -> dict[str, Path]:
    """The files of a task that is not jdist's own: its module, and what else of its package has been loaded.

    Args:
        make: `task.make`, whose module was imported.

    Returns:
        Each file by its path from where the package is: `my_package/my_task.py`.
    """
    package = make.partition(":")[0].partition(".")[0]
    if package == "jdist":  # the digest of all of it is recorded
        return {}
    found = {}
    for name, module in list(sys.modules.items()):  # other threads may import meanwhile
        path = Path(module.__file__ or "") if name.partition(".")[0] == package else Path()
        if path.suffix == ".py" and path.is_file():
            inner = "/__init__" if path.stem == "__init__" else ""
            found[f"{name.replace('.', '/')}{inner}.py"] = path
    return dict(sorted(found.items()))


def folder_sources(folder: Path) -> dict[str, Path]:
    """Every Python file below a folder, by its path from there."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}


def changed_sources(make: str, copies: Path) -> list[str]:
    """Which files of a task are not as a run has copied them; nothing is imported.

    Args:
        make: `task.make`.
        copies: the run's copies, as `task_sources` names them.

    Returns:
        Their names; a file that is gone, too.
    """
    path = sys.path if os.getcwd() in sys.path else [os.getcwd(), *sys.path]
    spec = PathFinder.find_spec(make.partition(":")[0].partition(".")[0], path)
    places = [] if spec is None else spec.submodule_search_locations or [spec.origin or ""]
    roots = [Path(place).parent for place in places]

    def is_alike(name: str, copy: Path) -> bool:
        here = next((root / name for root in roots if (root / name).is_file()), None)
        return here is not None and here.read_bytes() == copy.read_bytes()

    return [name for name, copy in folder_sources(copies).items() if not is_alike(name, copy)]


def digest(files: Mapping[str, Path]) -> str:
    """A hash of some files' names and content, wherever they lie; "" of none."""
    whole = hashlib.sha256()
    for name, path in files.items():
        whole.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()[:16] if files else ""
