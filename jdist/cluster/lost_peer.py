"""The record of a lost process, on standard error and in a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from jdist.cluster.address import refused
from jdist.cluster.environment import RECORD_FOLDER
from jdist.errors import PeerLostError

RECORD = "jdist: peer lost "  # begins the line that programs read, the launcher among them


def folder(environ: Mapping[str, str]) -> Path | None:
    """Makes the folder for records, JDIST_RECORD_DIR; None if that is not set."""
    if not (name := environ.get(RECORD_FOLDER)):
        return None
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise refused(RECORD_FOLDER, name, "a folder that can be written", f"{exc}.") from exc
    return Path(name)


def print_record(lost: PeerLostError, noticed_by: int) -> None:
    """Writes the record to standard error, for people, who read the end first, and programs."""
    lines = []
    for place in lost.places:
        lines.append(f"jdist: process {place['process']}, step {place['step']}: {place['phase']}")
        lines += [f"jdist:     {frame}" for frame in place["stack"]]
    lines += [f"{RECORD}{json.dumps(_record(lost, noticed_by))}", f"jdist: PeerLostError: {lost}"]
    # `print` has a lock, which a blocked thread may hold. The first newline ends a line that another thread has begun.
    os.write(2, ("\n" + "\n".join(lines) + "\n").encode())


def write_record(lost: PeerLostError, noticed_by: int, where: Path) -> None:
    """Writes the record to a file in the folder for records."""
    (where / f"peer_lost_process_{noticed_by}.json").write_text(json.dumps(_record(lost, noticed_by)) + "\n")


def _record(lost: PeerLostError, noticed_by: int) -> dict[str, object]:
    return {
        "error": "PeerLostError",
        "process": lost.process,
        "address": lost.address,
        "last_step": lost.last_step,
        "cause": lost.cause,
        "places": list(lost.places),
        "noticed_by": noticed_by,
        "time": time.time(),
    }
