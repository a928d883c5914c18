"""jdist distributes a JAX train step: written once, it runs on one device, on all of a machine, and beyond."""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import Any

__version__ = "0.1.0"
_STUB = (pkgutil.get_data(__name__, "__init__.pyi") or b"").decode()  # by the loader: jdist may be in a zip file
# The module of each public name, "jdist" for a module itself; type checkers and editors read the same lines.
_MODULES = {name: module for module, name in re.findall(r"^from (\S+) import (\w+)", _STUB, re.MULTILINE)}
__all__ = [*_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]  # it reads the stub


def __getattr__(name: str) -> Any:
    # Lazily, so that the command line answers `--help` without importing JAX.
    module = _MODULES.get(name)
    if module is None:
        from jdist.support.tensorflow_names import unknown

        raise unknown("module 'jdist'", name, __all__)
    if module == "jdist":
        return importlib.import_module(f"jdist.{name}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
