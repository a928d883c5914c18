"""The source files of a run's task."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

# What lies in such folders is installed, wherever they are: in a home directory, or in a virtual environment
# beside the task.
_PACKAGES = {"site-packages", "dist-packages"}
_JDIST, _PYTHON = Path(__file__).parents[1], Path(os.__file__).parent


def task_sources(make: str) -> dict[str, Path]:
    """Finds a user task's files: loaded modules of its package and next to it."""
    # Installed files (the standard library, packages, jdist) and the running program do not count.
    package = make.partition(":")[0].partition(".")[0]
    if package == "jdist":  # the digest of all of it is recorded
        return {}
    task = sys.modules[package].__spec__
    roots = [] if task is None else _roots(task)
    sources = {}
    for module, path in _loaded():
        root = next((root for root in roots if path.is_relative_to(root)), None)
        if root is None or not path.is_file():
            continue
        name = path.relative_to(root)
        is_own = name.parts[0].removesuffix(".py") == package
        if is_own or not (module in ("__main__", "__mp_main__") or _is_installed(path)):
            sources[name.as_posix()] = path
    return dict(sorted(sources.items()))


def _loaded() -> Iterator[tuple[str, Path]]:
    """Lists the modules that have a source file; a lazy one is not woken by asking for it."""
    for name, module in list(sys.modules.items()):  # other threads may import meanwhile
        path = Path(vars(module).get("__file__") or "") if isinstance(module, ModuleType) else Path()
        if path.suffix == ".py":
            yield name, path


def _is_installed(path: Path) -> bool:
    return not _PACKAGES.isdisjoint(path.parts) or path.is_relative_to(_JDIST) or path.is_relative_to(_PYTHON)


def _roots(package: ModuleSpec) -> list[Path]:
    """Lists where a module or a package is imported from; one without `__init__.py` may be in several folders."""
    return [Path(place).parent for place in package.submodule_search_locations or [package.origin or ""]]


def folder_sources(folder: Path) -> dict[str, Path]:
    """Finds every Python file below a folder, by its path from there."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}


def changed_sources(make: str, copies: Path) -> list[str]:
    """Lists the files of the task `make` that differ from a run's copies, or are gone; nothing is imported."""
    path = sys.path if os.getcwd() in sys.path else [os.getcwd(), *sys.path]
    spec = PathFinder.find_spec(make.partition(":")[0].partition(".")[0], path)
    roots = [] if spec is None else _roots(spec)

    def differs(name: str, copy: Path) -> bool:
        here = next((root / name for root in roots if (root / name).is_file()), None)
        return here is None or here.read_bytes() != copy.read_bytes()

    return [name for name, copy in folder_sources(copies).items() if differs(name, copy)]


def digest(files: Mapping[str, Path]) -> str:
    """Hashes the names and content of files, wherever they lie; "" of none."""
    whole = hashlib.sha256()
    for name, path in files.items():
        whole.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()[:16] if files else ""
