"""The run folder, held by one process at a time and written so that no kill leaves half a file."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jdist.errors import ConfigError
from jdist.report.files import first_free, writing
from jdist.support.file_lock import hold


class RunFolder:
    """The paths of one run, below `runs/NAME`."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.yaml"  # every value with its origin; itself a config that can be run
        self.metrics = path / "metrics.jsonl"  # one JSON object a line
        self.checkpoints = path / "checkpoints"
        self.curves = path / "curves.png"  # metrics over steps
        self.evaluations = path / "eval.jsonl"  # measured by an evaluator beside the run
        self.environment = path / "environment.json"  # each start that trained: its config and where it ran
        self.result = path / "result.json"  # checksums of the last state, once the run has ended
        self.times = path / "times.jsonl"  # what the time of each start went to
        self.source = path / "source"  # copies of the task's own files
        self.lock = path / ".lock"  # held by the process that writes the run, as long as it lives

    def has_checkpoints(self) -> bool:
        """Whether a run got as far as a first checkpoint; hidden and temporary entries do not count."""
        return self.checkpoints.is_dir() and any(not p.name.startswith(".") for p in self.checkpoints.iterdir())

    def has_rows(self) -> bool:
        """Whether a run got as far as a first row of metrics."""
        return self.metrics.is_file() and self.metrics.stat().st_size > 0


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[RunFolder]:
    """Makes the run folder if necessary, and holds it for this process until the block ends."""
    folder = RunFolder(path)
    with contextlib.ExitStack() as stack:
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(hold(folder.lock))
            except BlockingIOError:
                raise ConfigError(
                    f"{path}: another process is writing this run. Wait for it or stop it, or give this run another name; "
                    "if it is another process of the same job, say strategy.name=multi_worker."
                ) from None
        _check_no_strangers(path)
        yield folder


def check_can_be_made(path: Path) -> None:
    """Refuses folders that `open_folder` would refuse, and leaves nothing behind."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    with writing(path):
        if existing == path.absolute():
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            _check_no_strangers(path)
            return
        try:
            tempfile.TemporaryDirectory(dir=existing).cleanup()
        except OSError as exc:
            raise OSError(exc.errno, exc.strerror, str(path)) from exc  # names the run folder, not the temporary one


def _check_no_strangers(path: Path) -> None:
    strangers = sorted(p.name for p in path.iterdir() if not p.name.startswith("."))
    if strangers and not (path / "config.yaml").exists():
        raise ConfigError(
            f"{path}: not a run folder: it holds {', '.join(strangers[:3])} but no config.yaml. "
            "Give the run another name, or move the folder away."
        )


def set_aside(path: Path) -> Path | None:
    """Renames a run folder, if it exists, to the first free of `NAME.1`, `NAME.2`, ..."""
    if not path.exists():
        return None
    aside = first_free(path)
    with open_folder(path), writing(path):  # held, so that no other process is writing there
        path.rename(aside)
    return aside
