"""Where a step gathers arrays of the state that are in parts, noted while it is traced."""

from __future__ import annotations

import site
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PACKAGES = tuple({str(Path(p)) for p in (*site.getsitepackages(), sysconfig.get_paths()["stdlib"])}) + (
    str(Path(__file__).parents[1]),
)


@dataclass(frozen=True)
class Gather:
    """One place where a leaf in parts is gathered."""

    # its path; of an update's result, the path of the leaf that it was computed from first
    leaf: str
    why: str  # the place, described
    num_bytes: int  # a device then holds: the array, or one of its layers
    line: str  # the user's line that reads it, "file.py:12"; "" if JAX does not tell


def line_of(eqn: Any) -> str:
    """Finds the user's own line that an equation comes from, as far as JAX tells; else nothing."""
    frames = getattr(getattr(eqn.source_info, "traceback", None), "frames", ())
    own = next((frame for frame in frames if not frame.file_name.startswith((*_PACKAGES, "<"))), None)
    return "" if own is None else f"{Path(own.file_name).name}:{own.line_num}"
