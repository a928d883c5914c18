"""What is left behind of a lost process: a line on standard error, and a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from jdist.cluster.address import refused
from jdist.cluster.environment import RECORD_FOLDER
from jdist.errors import PeerLostError

RECORD = "jdist: peer lost "  # how the line begins that programs read, the launcher among them


def folder(environ: Mapping[str, str]) -> Path | None:
    """The folder for records, made if need be; None if there is to be none.

    Raises:
        ClusterConfigError: it cannot be made.
    """
    if not (name := environ.get(RECORD_FOLDER)):
        return None
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise refused(RECORD_FOLDER, name, "a folder that can be written", f"{exc}.") from exc
    return Path(name)


def say(lost: PeerLostError, noticed_by: int) -> None:
    """Lines on standard error, for people and for programs: not by `print`, as a blocked thread may hold its lock."""
    lines = [f"jdist: PeerLostError: {lost}"]
    for place in lost.places:
        lines.append(f"jdist: process {place['process']}, step {place['step']}: {place['phase']}")
        lines += [f"jdist:     {frame}" for frame in place["stack"]]
    lines.append(f"{RECORD}{json.dumps(_record(lost, noticed_by))}")
    os.write(2, ("\n".join(lines) + "\n").encode())


def write(lost: PeerLostError, noticed_by: int, where: Path) -> None:
    """A file in the folder for records.

    Raises:
        OSError: it cannot be written.
    """
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
