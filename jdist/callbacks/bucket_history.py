"""The rows of a run's history in a bucket, where nothing can be appended: the object is written anew with each checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdist.checkpoint.bucket import BucketPath
from jdist.checkpoint.locks import check_held
from jdist.report.metrics_file import Row, to_line, to_row


class BucketHistory:
    """The rows of a run, as `report.metrics_file.MetricsFile` has them on a disk."""

    def __init__(self, path: BucketPath, rows: list[Row]):
        self._path = path
        self._written = 0
        self.rows = rows

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds a row."""
        self.rows.append(to_row(step, values))

    def sync(self) -> None:
        """Writes the rows, if there are new ones."""
        if self._written < len(self.rows):
            check_held(self._path.parent)
            self._path.write_text("".join(map(to_line, self.rows)))
            self._written = len(self.rows)

    def close(self) -> None:
        """Ends; rows that no checkpoint has counted would be dropped by the run that goes on."""
