"""Failpoints: named points at which JDIST_FAILPOINTS kills or stops a process, for tests.

    JDIST_FAILPOINTS="process=1:step=after:kill@3; process=0:save=in:stop; process=1:attempt=1:restore=before:kill"

Process 1 kills itself (SIGKILL) after its third step, process 0 stops (SIGSTOP) in its first save, and process 1 of the
job's second attempt dies before it restores. The default is the first attempt. The third action is term (SIGTERM). A server
(`jdist serve`) is process 0 of its own.
"""

from __future__ import annotations

import enum
import os
import re
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from jdist.cluster.address import refused
from jdist.cluster.environment import ATTEMPT

VARIABLE = "JDIST_FAILPOINTS"
_ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
_FORM = re.compile(r"process=(\d+):(?:attempt=(\d+):)?([a-z]+=[a-z]+):([a-z]+)(?:@(\d+))?", re.ASCII)


class Point(enum.Enum):
    """A point in a process's work."""

    BEFORE_CONNECT = "connect=before"  # to process 0
    IN_CONNECT = "connect=in"  # connected, no hello sent yet
    AFTER_CONNECT = "connect=after"  # all have come
    BEFORE_INIT = "init=before"  # of JAX's runtime
    IN_INIT = "init=in"  # JAX's processes have met, their devices are not there yet
    AFTER_INIT = "init=after"
    BEFORE_STEP = "step=before"
    IN_STEP = "step=in"  # dispatched, and perhaps still computing
    AFTER_STEP = "step=after"
    BEFORE_SAVE = "save=before"
    IN_SAVE = "save=in"
    AFTER_SAVE = "save=after"
    BEFORE_RESTORE = "restore=before"
    IN_RESTORE = "restore=in"
    AFTER_RESTORE = "restore=after"
    AT_END = "end=before"  # the program is at its end, the others do not know yet
    IN_END = "end=in"  # all have come to their end
    # Of a parameter server's worker:
    BEFORE_PUSH = "push=before"  # computed, nothing sent
    IN_PUSH = "push=in"  # sent to one server; the next time, to the next
    AFTER_PUSH = "push=after"  # staged on all servers, committed on none
    AFTER_COMMIT = "commit=after"  # committed on all servers, not reported
    # Of a parameter server:
    IN_SNAPSHOT = "snapshot=in"  # its part is taken, and nobody has read it
    IN_REPLACE = "replace=in"  # asked to start over, and has not


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A signal that a process sends itself when it reaches a point for the `nth` time, from 1."""

    process: int
    attempt: int
    point: Point
    signal: signal.Signals
    nth: int


_armed: tuple[Failure, ...] = ()
_times: dict[Point, int] = {}


def parse(text: str) -> tuple[Failure, ...]:
    """Parses failures with ";" between them."""
    return tuple(_parse(part.strip()) for part in text.split(";"))


def arm(process: int, environ: Mapping[str, str]) -> None:
    """Arms the failures of this process and attempt; see `parse`."""
    global _armed
    text = environ.get(VARIABLE)
    attempt = environ.get(ATTEMPT, "0")
    failures = () if text is None else parse(text)
    _armed = tuple(f for f in failures if f.process == process and str(f.attempt) == attempt)
    _times.clear()


def armed() -> bool:
    """Returns whether any failure is armed in this process."""
    return bool(_armed)


def reached(point: Point) -> None:
    """Fires the failures that are armed for this point."""
    if not _armed:
        return
    _times[point] = _times.get(point, 0) + 1
    for failure in _armed:
        if failure.point is point and failure.nth == _times[point]:
            os.write(2, f"jdist: failpoint {point.value}, {failure.signal.name}\n".encode())
            signal.pthread_kill(threading.get_ident(), failure.signal)  # stops this thread, whichever it is


def _parse(part: str) -> Failure:
    match = _FORM.fullmatch(part)
    points = {point.value: point for point in Point}
    if match is None or match[3] not in points or match[4] not in _ACTIONS or match[5] == "0":
        allowed = "process=N:POINT:kill or process=N:POINT:stop (or term), then @n for the nth time"
        raise refused(VARIABLE, part, allowed, f"POINT is one of {', '.join(points)}.")
    process, attempt, point, action, nth = match.groups()
    return Failure(
        process=int(process), attempt=int(attempt or 0), point=points[point], signal=_ACTIONS[action], nth=int(nth or 1)
    )
