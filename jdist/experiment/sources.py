"""The source files that a run's task consists of."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path


def task_sources(make: str) -> list[Path]:
    """The files of a task that is not jdist's own: its module, and what else of its package has been loaded.

    Args:
        make: `task.make`, whose module was imported.
    """
    package = make.partition(":")[0].partition(".")[0]
    if package == "jdist":  # the digest of all of it is recorded
        return []
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == package]
    files = {Path(module.__file__) for module in modules if module.__file__}
    return sorted(path for path in files if path.suffix == ".py" and path.is_file())


def digest(files: Iterable[Path]) -> str:
    """A hash of some files' names and content, wherever they lie; "" of none."""
    found = sorted(files)
    whole = hashlib.sha256()
    for path in found:
        whole.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()[:16] if found else ""
