"""A run's rows beside its checkpoints: each is written once, where a checkpoint with all of them would grow with the run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jdist.report.files import write_atomically, writing

Row = dict[str, Any]


class RowsFile:
    """The rows that do not change any more, one JSON object a line.

    Args:
        path: the file.
    """

    def __init__(self, path: Path):
        self._path, self._count = path, 0

    def read(self, count: int) -> list[Row]:
        """The first rows, as many as were written when a checkpoint was saved; fewer if the file lacks some.

        Of a damaged file those before the damage: behind it a line may not be the row that it counts as.
        """
        rows: list[Row] = []
        if not count or not self._path.exists():
            return rows
        for line in self._path.read_bytes().splitlines()[:count]:
            try:
                row = json.loads(line)
            except ValueError:  # no JSON, or no UTF-8
                break
            if not isinstance(row, dict):
                break
            rows.append(row)
        return rows

    def begin(self, rows: Sequence[Row]) -> None:
        """Holds these rows and no others.

        Raises:
            ConfigError: the file system refuses.
        """
        self._count = len(rows)
        if rows or self._path.exists():
            write_atomically(self._path, _lines(rows))

    def extend(self, rows: Sequence[Row]) -> None:
        """Adds those of a run's rows that it does not hold yet; the disk has them when this returns.

        Raises:
            ConfigError: the file system refuses.
        """
        with writing(self._path), self._path.open("a", encoding="utf-8") as handle:
            handle.write(_lines(rows[self._count :]))
            handle.flush()
            os.fsync(handle.fileno())
        self._count = len(rows)


def _lines(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
