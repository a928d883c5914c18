"""The run folder: the resolved config, `metrics.jsonl`, and a lock so that only one process writes them.

runs/NAME/config.yaml     every value with its origin; itself a config that can be run
runs/NAME/metrics.jsonl   one JSON object a line
runs/NAME/checkpoints/    written by jdist.train.checkpoint
runs/NAME/curves.png      loss and evaluation metrics over steps
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from jdist.errors import ConfigError

Row = dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """Where one run is written.

    Attributes:
        path: the folder, `runs/NAME`.
    """

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """What was measured, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def curves(self) -> Path:
        """The plot of the metrics."""
        return self.path / "curves.png"

    def has_checkpoints(self) -> bool:
        """Whether a run got as far as a first checkpoint; hidden and temporary entries do not count."""
        return self.checkpoints.is_dir() and any(not p.name.startswith(".") for p in self.checkpoints.iterdir())


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[RunFolder]:
    """Make the run folder if need be, and hold it for this process alone until the block ends.

    Args:
        path: the folder.

    Yields:
        The folder.

    Raises:
        ConfigError: it cannot be made, holds something that is no run, or another process writes it.
    """
    import fcntl  # POSIX only: imported here so that the rest of jdist can be imported anywhere

    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        handle = (path / ".lock").open("a")
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go of it however the process ends
        except BlockingIOError:
            raise ConfigError(
                f"{path}: another process is writing this run. Wait for it or stop it, or give this run another name."
            ) from None
        strangers = sorted(p.name for p in path.iterdir() if not p.name.startswith("."))
        if strangers and not (path / "config.yaml").exists():
            raise ConfigError(
                f"{path}: not a run folder: it holds {', '.join(strangers[:3])} but no config.yaml. "
                "Give the run another name, or move the folder away."
            )
        yield RunFolder(path)


def set_aside(path: Path) -> Path | None:
    """Rename a run folder to the first free of `NAME.1`, `NAME.2`, ...

    Args:
        path: the folder.

    Returns:
        Its new name; None if there was none.

    Raises:
        ConfigError: another process is writing it, it is no run folder, or the file system refuses.
    """
    if not path.exists():
        return None
    number = next(n for n in itertools.count(1) if not path.with_name(f"{path.name}.{n}").exists())
    aside = path.with_name(f"{path.name}.{number}")
    with open_folder(path), writing(path):  # held, so that no other process is writing there
        path.rename(aside)
    return aside


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure of the file system into a `ConfigError` that names the path."""
    try:
        yield
    except OSError as exc:
        where = exc.filename or path
        raise ConfigError(
            f"{where}: cannot be written: {exc.strerror or exc}. What was saved before is untouched; "
            "free or mend the disk, or choose another place with log.folder=FOLDER, and run the same command "
            "again."
        ) from exc


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file as a whole: whenever this process is killed, the old file is there or the new one.

    Args:
        path: the file.
        content: its new content; text is written as UTF-8.

    Raises:
        ConfigError: the file system refuses; the old file is untouched.
    """
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        try:
            with partial.open("wb") as handle:
                handle.write(content.encode() if isinstance(content, str) else content)
                handle.flush()
                os.fsync(handle.fileno())
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


@dataclass
class MetricsFile:
    """`metrics.jsonl`, open for appending.

    Attributes:
        path: the file.
        rows: every row up to now, each a dict with "step" first.
    """

    path: Path
    rows: list[Row] = field(default_factory=list)
    _handle: IO[str] | None = None

    @classmethod
    def open(cls, path: Path, *, step: int) -> MetricsFile:
        """Open the file of a run that goes on after `step`; what was written later is dropped.

        Args:
            path: the file; made if it is not there.
            step: the step that was restored, 0 for a new run.

        Raises:
            ConfigError: a line before the last is no JSON object, or the file cannot be written.
        """
        before = read_rows(path)
        rows = [row for row in before if row["step"] <= step]
        text = "".join(_line(row) for row in rows)
        with writing(path):
            unchanged = path.exists() and path.read_text(encoding="utf-8") == text
            if not unchanged:
                write_atomically(path, text)
            return cls(path, rows, path.open("a", encoding="utf-8"))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one row; it is in the file, whole, when this returns.

        Args:
            step: the number of steps done.
            values: plain numbers by name; NaN and infinities are written as null, which JSON lacks.

        Raises:
            ConfigError: the file system refuses.
        """
        if self._handle is None:
            raise ConfigError(f"{self.path}: the metrics of this run are closed already.")
        row = {"step": step} | {name: _finite(value) for name, value in values.items()}
        with writing(self.path):
            self._handle.write(_line(row))
            self._handle.flush()
        self.rows.append(row)

    def close(self) -> None:
        """Bring everything to the disk and close the file."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            with writing(self.path), handle:
                os.fsync(handle.fileno())


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics file; a last line torn by a kill is left out.

    Args:
        path: the file; one that is not there has no rows.

    Raises:
        ConfigError: a line before the last is no JSON object with a step, or the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}.") from exc
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise ConfigError(f'{path}:{number}: not a JSON object with a "step". Mend or delete that line.')
    return rows


def _row(line: str) -> Row | None:
    if not line.endswith("\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
