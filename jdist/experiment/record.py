"""The run folder, held by one process at a time and written so that no kill leaves half a file.

runs/NAME/config.yaml     every value with its origin; itself a config that can be run
runs/NAME/metrics.jsonl   one JSON object a line
runs/NAME/checkpoints/    written by jdist.checkpoint.checkpointer
runs/NAME/curves.png      loss and evaluation metrics over steps
runs/NAME/eval.jsonl      what an evaluator has measured, if there is one
runs/NAME/environment.json, result.json, source/    what it takes to repeat the run; see repeatable.py
"""

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
    """The paths of one run.

    Args:
        path: the folder, `runs/NAME`.

    Attributes:
        path: the folder.
        config: the resolved config.
        metrics: what was measured, one JSON object a line.
        checkpoints: the folder of checkpoints.
        evaluations: what an evaluator beside the run has measured, one JSON object a line.
        environment: with which config and in which environment each start trained.
        result: the checksums of the last state; there once the run has come to its end.
        source: copies of the task's own source files.
        curves: the plot of the metrics.
        lock: held by the process that writes the run, as long as it lives.
    """

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.evaluations = path / "eval.jsonl"
        self.environment = path / "environment.json"
        self.result = path / "result.json"
        self.source = path / "source"
        self.curves = path / "curves.png"
        self.lock = path / ".lock"

    def has_checkpoints(self) -> bool:
        """Whether a run got as far as a first checkpoint; hidden and temporary entries do not count."""
        return self.checkpoints.is_dir() and any(not p.name.startswith(".") for p in self.checkpoints.iterdir())

    def has_rows(self) -> bool:
        """Whether a run got as far as a first row of metrics."""
        return self.metrics.is_file() and self.metrics.stat().st_size > 0


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
    """Refuse what `open_folder` would refuse, and leave nothing behind.

    Args:
        path: the run folder.

    Raises:
        ConfigError: it cannot be made or written, or holds something that is no run.
    """
    there = path.absolute()
    while not there.exists():
        there = there.parent
    with writing(path):
        if there == path.absolute():
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            _check_no_strangers(path)
            return
        try:
            tempfile.TemporaryDirectory(dir=there).cleanup()
        except OSError as exc:
            raise OSError(exc.errno, exc.strerror, str(path)) from exc  # not what was tried in its place


def _check_no_strangers(path: Path) -> None:
    strangers = sorted(p.name for p in path.iterdir() if not p.name.startswith("."))
    if strangers and not (path / "config.yaml").exists():
        raise ConfigError(
            f"{path}: not a run folder: it holds {', '.join(strangers[:3])} but no config.yaml. "
            "Give the run another name, or move the folder away."
        )


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
    aside = first_free(path)
    with open_folder(path), writing(path):  # held, so that no other process is writing there
        path.rename(aside)
    return aside
