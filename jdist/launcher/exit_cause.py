"""How processes of a job ended, and which of them is to blame. Pure."""

from __future__ import annotations

import enum
import json
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from jdist.cluster.exit_status import CANNOT_WRITE, FINISHED, INTERRUPTED, PEER_LOST, PREEMPTED, USAGE
from jdist.cluster.lost_peer import RECORD

WORKER, EVALUATOR, CHIEF = "worker", "evaluator", "chief"
_CANNOT_BE_STARTED = (126, 127)  # as shells say: not executable, not found


@dataclass(frozen=True, order=True)
class Task:
    """One place in the job, as TF_CONFIG names it.

    Attributes:
        type: "worker", "evaluator" or "chief"; of a server "worker" or "ps".
        index: counted from 0 within its type.
        serves: whether it runs `jdist serve`.
    """

    type: str
    index: int
    serves: bool = False

    @property
    def label(self) -> str:
        """What its output lines begin with: the index of a worker, the type of others, both of a server."""
        if self.serves:
            return str(self)
        return str(self.index) if self.type == WORKER else self.type

    def __str__(self) -> str:
        if self.serves:
            return f"{self.type} {self.index}"
        return f"process {self.index}" if self.type == WORKER else f"the {self.type}"


@dataclass(frozen=True, kw_only=True)
class End:
    """How one process ended.

    Attributes:
        task: which.
        code: its exit code; minus the signal's number if a signal ended it.
        at: when, in seconds of the launcher's clock.
        told: the last signal that the launcher had sent it before.
    """

    task: Task
    code: int
    at: float
    told: signal.Signals | None = None


class Kind(enum.IntEnum):
    """What an end means; of several, the lowest is the cause."""

    CRASHED = 0  # a signal, or an exit code that tells of trouble of its own
    STALLED = 1  # the launcher had to kill it
    LEFT = 2  # saved and left because somebody asked it to, not the launcher
    PEER_LOST = 3  # ended because another did
    WELL = 4


def kind(end: End) -> Kind:
    """What an end means.

    Example:
        >>> kind(End(task=Task("worker", 0), code=-9, at=0.0)).name
        'CRASHED'
    """
    asked = end.told in (signal.SIGINT, signal.SIGTERM)
    if end.code == FINISHED or (asked and end.code in (INTERRUPTED, PREEMPTED, -signal.SIGINT, -signal.SIGTERM)):
        return Kind.WELL
    if end.told == signal.SIGKILL and end.code == -signal.SIGKILL:
        return Kind.STALLED
    if end.code == PEER_LOST:
        return Kind.PEER_LOST
    return Kind.LEFT if end.code in (INTERRUPTED, PREEMPTED) else Kind.CRASHED


def guilty(ends: Iterable[End]) -> End | None:
    """The end that explains the others: by its kind, then the earliest; None if all ended well."""
    return min((end for end in ends if kind(end) != Kind.WELL), key=lambda end: (kind(end), end.at), default=None)


def lost(ends: Iterable[End]) -> int:
    """How many processes to do without: the guilty one, and others that were killed from outside.

    Survivors of a broken collective end in many ways (an exception, SIGABRT), so other ends do not count.
    """
    ends = tuple(ends)
    cause = guilty(ends)
    if cause is None or kind(cause) not in (Kind.CRASHED, Kind.STALLED):
        return 0
    return len({cause.task, *(end.task for end in ends if end.code == -signal.SIGKILL and end.told is None)})


def exit_code(end: End) -> int:
    """The exit code that tells of `end`: its own, or 128 plus the signal's number as in shells."""
    return end.code if end.code >= 0 else 128 - end.code


def mendable(end: End) -> bool:
    """Whether starting again may help: not if what was asked for is not right, cannot be started, or nothing can be written."""
    return end.code not in (USAGE, CANNOT_WRITE, *_CANNOT_BE_STARTED)


def how(end: End) -> str:
    """The end in words, to follow the name of its task.

    Example:
        >>> how(End(task=Task("worker", 0), code=-9, at=0.0))
        'was killed by SIGKILL'
    """
    meaning = kind(end)
    if meaning == Kind.STALLED:
        return "did not end and had to be killed"
    if end.code < 0:
        return f"was killed by {signal_name(-end.code)}"
    remark = {Kind.PEER_LOST: " (it lost a peer)", Kind.LEFT: " (asked to stop, not by the launcher)"}
    more = " (a disk is full, or may not be written)" if end.code == CANNOT_WRITE else remark.get(meaning, "")
    return f"ended with exit code {end.code}{more}"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; real-time signals have only a number."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


_HEADER = re.compile(r"\s*(\+ Exception Group )?Traceback \(most recent call last\):")
# What XLA and its libraries write round an error of somebody else's: log lines of absl, banners, traces of their own.
_NOISE = re.compile(
    r"[IWEF]\d{4} \d\d:\d\d:\d\d|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.\d]*: [IWEF] |WARNING: (All log messages|Logging) before "
    r"|=== Source Location Trace|\*{3} |learning/|(external|third_party|xla|tsl)/\S+\.(cc|h):\d+|PC: @|\s*@\s+0x"
)
_SAID = "jdist: "  # how a message of jdist's begins; a record for programs, and a frame of a stack, do not explain
_NO_REASON = re.compile(rf"{re.escape(RECORD)}\{{|jdist: (    |process \d+, step )")
LONGEST = 30  # lines
LINES_WITHOUT = 8


def explanation(stderr: str) -> list[str]:
    """The last traceback, or else the last lines.

    Args:
        stderr: the last part of it.

    Returns:
        Lines, at most `LONGEST`: of a long traceback the beginning and the end, of a long message the beginning.
    """
    lines = [line.rstrip() for line in stderr.splitlines()]
    header = max((n for n, line in enumerate(lines) if _HEADER.match(line)), default=None)
    if header is None:
        lines = [line for line in lines if line]
        said = [line for line in _without_noise(lines) if not _NO_REASON.match(line)]
        return (said or lines)[-LINES_WITHOUT:]
    message = _message(lines, header)
    frames, said = lines[header:message], lines[message : message + LINES_WITHOUT]
    if len(frames) + len(said) > LONGEST:
        kept = LONGEST - len(said) - 1
        first = kept // 3
        frames = [*frames[:first], f"  ... {len(frames) - kept} lines left out ...", *frames[first - kept :]]
    while said and not said[-1]:
        said.pop()
    return frames + said


def lost_peer(stderr: str) -> tuple[int, str] | None:
    """The process that this one says the job has lost, and why; None if it says nothing of the kind."""
    for line in reversed(stderr.splitlines()):
        if line.startswith(RECORD):
            try:
                match json.loads(line.removeprefix(RECORD)):
                    case {"process": int(process), "cause": str(why)}:
                        return process, why
            except ValueError:  # cut off
                return None
    return None


def cause(stderr: str) -> str:
    """One line: the exception and its message's first line, or else jdist's last line, or the last; empty if there is none."""
    lines = stderr.splitlines()
    header = max((n for n, line in enumerate(lines) if _HEADER.match(line)), default=None)
    if header is not None:
        message = _message(lines, header)
        return lines[message].strip("| ") if message < len(lines) else ""
    lines = [line.strip() for line in lines if line.strip()]
    reasons = [line for line in lines if line.startswith(_SAID) and not _NO_REASON.match(line)]
    return (reasons or _without_noise(lines) or lines or [""])[-1]


def _without_noise(lines: list[str]) -> list[str]:
    return [line for line in lines if not _NOISE.match(line)]


def _message(lines: list[str], header: int) -> int:
    """The number of the line after the frames, which are indented; in a group, behind a bar."""
    group = lines[header].lstrip().startswith("+")
    for n in range(header + 1, len(lines)):
        line = lines[n].lstrip().removeprefix("| ") if group else lines[n]
        if line and line[0] not in " \t":
            return n
    return len(lines)
