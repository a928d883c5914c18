"""`events.jsonl` of a launch: when each process began and ended, for `jdist runs --timeline`.

Each line is a JSON object with the time in seconds since 1970:

    {"at": 1800000000.0, "event": "launch", "command": ["train.py"], "max_restarts": 3}
    {"at": ..., "event": "attempt", "attempt": 0, "processes": 2}
    {"at": ..., "event": "process", "attempt": 0, "process": "0"}
    {"at": ..., "event": "end", "attempt": 0, "process": "0", "code": -9}
    {"at": ..., "event": "signal", "signal": "SIGTERM"}
    {"at": ..., "event": "world", "attempt": 0, "generation": 1, "numbers": [0, 1, 3]}
    {"at": ..., "event": "lost", "attempt": 0, "number": 2}
    {"at": ..., "event": "done", "code": 0}

A code below 0 is minus the number of the signal that ended the process. A process that begins twice in an attempt was
replaced. A line is whole once it is written, so a launcher that
is killed leaves what happened before.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jdist.cluster.environment import ATTEMPT, RECORD_FOLDER

NAME = "events.jsonl"


class Record:
    """The appended record of a launch; a disk that refuses ends the record, not the job."""

    # `say` tells the user that the record is incomplete.

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = folder / NAME, say
        self._is_whole = True

    def add(self, event: str, *, at: float | None = None, **values: Any) -> None:
        """Adds a line about an event at a time of `time.monotonic` (None: now)."""
        if not self._is_whole:
            return
        ago = 0.0 if at is None else time.monotonic() - at
        line = json.dumps({"at": round(time.time() - ago, 3), "event": event, **values})
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as exc:
            self._is_whole = False
            self._say(
                f"{self._path} is not whole: {exc.strerror or exc}; `jdist runs --timeline` will lack what comes now"
            )


def launch_of(environ: Mapping[str, str], run: Path) -> dict[str, Any]:
    """Describes this process's launch, for a run's own record; empty without a launch."""
    # The launch's folder is relative to the run's, so that both can be moved together.
    folder, attempt = environ.get(RECORD_FOLDER), environ.get(ATTEMPT, "")
    if not folder or not attempt.isdigit():
        return {}
    return {
        "launch": os.path.relpath(os.path.dirname(os.path.abspath(folder)), run.absolute()),
        "launch_attempt": int(attempt),
    }
