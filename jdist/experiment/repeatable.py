"""Writes what it takes to repeat a run and to compare the repetition bit for bit.

runs/NAME/environment.json   each start that trained: from which step, with which config, in which environment
runs/NAME/source/            the task's own source files, if it is not one of jdist's
runs/NAME/result.json        at the end: the sha256 of each leaf of the state
"""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from jdist.errors import ConfigError
from jdist.experiment.load import dotted, leaves
from jdist.experiment.record import RunFolder
from jdist.experiment.sources import task_sources
from jdist.report.files import write_atomically, writing

T = TypeVar("T")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a run: what its part of the steps came from.

    Attributes:
        step: the step it went on from; 0 at first.
        total_steps: the steps it was to come to.
        config: the whole config as plain values.
        environment: what the bits depend on besides, see `jdist.experiment.environment`.
        at: when, in UTC.
    """

    step: int
    total_steps: int
    config: dict[str, Any]
    environment: dict[str, Any]
    at: str = field(default_factory=_now)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The end of a run.

    Attributes:
        step: the last step.
        state: sha256 of each leaf of the state, by its path.
        at: when, in UTC.
        stopped: why a callback ended the run before its last step; None if none did.
    """

    step: int
    state: dict[str, str]
    at: str = field(default_factory=_now)
    stopped: str | None = None

    def is_end(self, total_steps: int) -> bool:
        """Whether it is the end of a run of so many steps."""
        return self.step >= total_steps or self.stopped is not None


def write_start(folder: RunFolder, start: Start) -> None:
    """Add a start to those of a run; earlier ones that it did not go on from left nothing in it, and are dropped.

    Args:
        folder: the run folder.
        start: the new start.

    Raises:
        ConfigError: the file system refuses, or what is there was not written by this.
    """
    starts = [asdict(earlier) for earlier in read_starts(folder) if earlier.step < start.step]
    write_atomically(folder.environment, json.dumps({"starts": [*starts, asdict(start)]}, indent=1) + "\n")
    with writing(folder.source):
        for name, path in task_sources(start.config["task"]["make"]).items():
            copy = folder.source / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def read_starts(folder: RunFolder) -> list[Start]:
    """The starts of a run, in order; none if nothing was written.

    Raises:
        ConfigError: the file cannot be read.
    """
    content = _read(folder.environment)
    return [] if content is None else _of(folder.environment, lambda: [Start(**start) for start in content["starts"]])


def write_result(folder: RunFolder, result: Result) -> None:
    """Write down what a run came to.

    Args:
        folder: the run folder.
        result: the end of the run.

    Raises:
        ConfigError: the file system refuses.
    """
    write_atomically(folder.result, json.dumps(asdict(result), indent=1) + "\n")


def read_result(folder: RunFolder) -> Result | None:
    """Reads the end of a run; None if it has not come to it.

    Raises:
        ConfigError: the file cannot be read.
    """
    content = _read(folder.result)
    return None if content is None else _of(folder.result, lambda: Result(**content))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}. Delete it, or start the run again with --fresh.") from exc


def _of(path: Path, make: Callable[[], T]) -> T:
    try:
        return make()
    except (TypeError, KeyError) as exc:
        text = f"{path}: not as this jdist writes it: {exc}. Delete it, or start the run again with --fresh."
        raise ConfigError(text) from exc


def differences_from(starts: Sequence[Start], here: Mapping[str, Any]) -> str:
    """Says what may keep a repetition from coming to the same bits.

    Args:
        starts: those of the run that is repeated, at least one; the config is that of the last.
        here: the environment of the repetition.

    Returns:
        `the environment is that of the run`, or what differs, a line each, for each start.
    """
    lines = []
    again = {dotted(key): value for key, value in leaves(starts[-1].config)}
    for start in starts:
        where = f" from step {start.step:,}" if len(starts) > 1 else ""
        config = {dotted(key): value for key, value in leaves(start.config)}
        for there, now in ((config, again), (start.environment, here)):
            different = [name for name in {**there, **now} if there.get(name) != now.get(name)]
            lines += [f"  {n}: {there.get(n, 'not set')} there{where}, {now.get(n, 'not set')} here" for n in different]
    if not lines:
        return "the environment is that of the run"
    return "\n".join(["not as it was in the run, so it may come to other bits:", *lines])
