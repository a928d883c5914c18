"""What it takes to repeat a run and compare the two bit for bit: environment.json, source/ and result.json of its folder."""

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
    """One start of a run that trained."""

    step: int  # from which it trained; 0 at first
    total_steps: int  # of the whole run
    config: dict[str, Any]  # the whole config as plain values
    environment: dict[str, Any]  # what else the bits depend on, see `jdist.experiment.environment`
    at: str = field(default_factory=_now)  # in UTC


@dataclass(frozen=True, kw_only=True)
class Result:
    """The end of a run."""

    step: int  # the last one
    state: dict[str, str]  # sha256 of each leaf of the state, by its path
    at: str = field(default_factory=_now)  # in UTC
    stopped: str | None = None  # why a callback ended the run before its last step; None if none did

    def is_end(self, total_steps: int) -> bool:
        """Whether it is the end of a run of so many steps."""
        return self.step >= total_steps or self.stopped is not None


def write_start(folder: RunFolder, start: Start) -> None:
    """Adds a start to a run's, drops those that left nothing, and copies the task's source."""
    starts = [asdict(earlier) for earlier in read_starts(folder) if earlier.step < start.step]
    write_atomically(folder.environment, json.dumps({"starts": [*starts, asdict(start)]}, indent=1) + "\n")
    with writing(folder.source):
        for name, path in task_sources(start.config["task"]["make"]).items():
            copy = folder.source / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def read_starts(folder: RunFolder) -> list[Start]:
    """Reads the starts of a run, in order; none without a file."""
    return _read(folder.environment, lambda content: [Start(**start) for start in content["starts"]]) or []


def write_result(folder: RunFolder, result: Result) -> None:
    """Writes the result of a run."""
    write_atomically(folder.result, json.dumps(asdict(result), indent=1) + "\n")


def read_result(folder: RunFolder) -> Result | None:
    """Reads the result of a run; None before its end."""
    return _read(folder.result, lambda content: Result(**content))


def _read(path: Path, make: Callable[[Any], T]) -> T | None:
    try:
        return make(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}. Delete it, or start the run again with --fresh.") from exc
    except (TypeError, KeyError) as exc:
        text = f"{path}: not as this jdist writes it: {exc}. Delete it, or start the run again with --fresh."
        raise ConfigError(text) from exc


def differences_from(starts: Sequence[Start], here: Mapping[str, Any]) -> str:
    """Lists differences that may change a repetition's bits, a line for each original start."""
    # The repetition has the config of the last start.
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
