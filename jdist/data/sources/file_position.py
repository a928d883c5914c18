"""Positions in files: which row of which window of which epoch comes next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jdist.errors import DatasetError
from jdist.support.checks import as_int


@dataclass(frozen=True)
class FilePosition:
    """The next row of a source of files."""

    epoch: int = 0
    file: int = 0  # number of the first file of the window, in the epoch's order
    row: int = 0  # rows of the window that were handed out
    rows: int = 0  # rows of the epoch before the window
    seen: int = 0  # the same, including other shards' rows
    counts: tuple[int, ...] = ()  # rows of each file of the window; empty if it was not read

    def to_json(self) -> dict[str, Any]:
        """Writes it as a dict that JSON can hold."""
        return asdict(self) | {"counts": list(self.counts)}

    @classmethod
    def from_json(cls, saved: Any) -> FilePosition:
        """Reads a position that `to_json` wrote."""
        fields = dict(saved) if isinstance(saved, Mapping) else {}
        counts = fields.pop("counts", None)
        numbers = [*fields.values(), *(counts if isinstance(counts, list | tuple) else [None])]
        if set(fields) != set(asdict(cls())) - {"counts"} or any(as_int(number, least=0) is None for number in numbers):
            raise DatasetError(f"this is no saved position in files: {saved!r}")
        return cls(**fields, counts=tuple(counts))
