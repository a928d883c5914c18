"""The ends of an attempt's processes: which of them is to blame and why, and the report of it. Pure."""

from __future__ import annotations

import enum
import itertools
import json
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jdist.cluster.exit_status import CANNOT_WRITE, FINISHED, INTERRUPTED, PEER_LOST, PREEMPTED, RECORD, USAGE

WORKER, EVALUATOR, CHIEF, PS = "worker", "evaluator", "chief", "ps"
QUICK_S = 30.0  # after an attempt that fails sooner the next one waits longer
_CANNOT_BE_STARTED = (126, 127)  # as shells say: not executable, not found
_HEADER = re.compile(r"\s*(\+ Exception Group )?Traceback \(most recent call last\):")
# Lines that XLA and its libraries write round an error: absl's log lines, banners, traces.
_NOISE = re.compile(
    r"[IWEF]\d{4} \d\d:\d\d:\d\d|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.\d]*: [IWEF] |WARNING: (All log messages|Logging) before "
    r"|=== Source Location Trace|\*{3} |learning/|(external|third_party|xla|tsl)/\S+\.(cc|h):\d+|PC: @|\s*@\s+0x"
)
# What follows ends a process that waited for a lost one: JAX's words about it blame whom they name at random.
_ENDED_BY_JAX = re.compile(r"^.*Terminating process because the JAX distributed service detected", re.MULTILINE)
_MESSAGE = "jdist: "  # begins jdist's messages; records for programs and frames of a stack among them explain nothing
_NO_REASON = re.compile(rf"{re.escape(RECORD)}\{{|jdist: (    |process \d+, step )")
# The first line of a warning and the source line that follows it, and jdist's note of a step that it did not verify:
# never a cause. Anchored, as a bar's output is one long line.
_WARNING = re.compile(
    r"^[^\n:]+:\d+: \w*Warning: .*\n([ \t]+\S.*(\n|$))?|^[^\s:]+: verify (found|could) .*(\n|$)", re.MULTILINE
)
# Signals from outside, which no line of the process's own explains.
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
LONGEST = 30  # lines
LINES_WITHOUT = 8


@dataclass(frozen=True, order=True)
class Task:
    """A process's place in the job, as TF_CONFIG names it."""

    type: str  # "worker", "evaluator" or "chief"; of a server "worker" or "ps"
    index: int  # from 0 within its type
    serves: bool = False  # whether it runs `jdist serve`

    @property
    def label(self) -> str:
        """The beginning of its output lines: a worker's index, another's type, a server's type and index."""
        if self.serves:
            return str(self)
        return str(self.index) if self.type == WORKER else self.type

    def __str__(self) -> str:
        if self.serves:
            return f"{self.type} {self.index}"
        return f"process {self.index}" if self.type == WORKER else f"the {self.type}"


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of one process."""

    task: Task
    code: int  # its exit code; minus the signal's number if a signal ended it
    at: float  # seconds of the launcher's clock
    sent: signal.Signals | None = None  # the last signal that the launcher had sent it

    @property
    def was_killed(self) -> bool:
        """Returns whether a signal from outside ended it."""
        return -self.code in _FROM_OUTSIDE


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The end of one attempt."""

    number: int  # from 0
    size: int  # number of workers
    duration_s: float  # from its start until all its processes were gone
    ends: tuple[End, ...]  # in order of time
    guilty: End | None  # the end that explains the others; None if nothing failed
    outcome: str  # "finished", "failed", "stopped" (by the user) or "grown" (stopped to go on with more)
    lost: int = 0  # processes without which the others went on
    worlds: int = 0  # in which they did


class Kind(enum.IntEnum):
    """The meaning of an end; of several ends, that of the lowest kind is the cause."""

    CRASHED = 0  # by a signal, or an error of its own
    STALLED = 1  # the launcher had to kill it
    LEFT = 2  # saved and left, asked by somebody other than the launcher
    PEER_LOST = 3  # ended because another did
    WELL = 4


def kind(end: End) -> Kind:
    """Classifies an end."""
    asked = end.sent in (signal.SIGINT, signal.SIGTERM)
    if end.code == FINISHED or (asked and end.code in (INTERRUPTED, PREEMPTED, -signal.SIGINT, -signal.SIGTERM)):
        return Kind.WELL
    if end.sent == signal.SIGKILL and end.code == -signal.SIGKILL:
        return Kind.STALLED
    if end.code == PEER_LOST:
        return Kind.PEER_LOST
    return Kind.LEFT if end.code in (INTERRUPTED, PREEMPTED) else Kind.CRASHED


def find_guilty(ends: Iterable[End]) -> End | None:
    """Finds the end that explains the others: of the lowest kind the earliest; None if all ended well."""
    return min((end for end in ends if kind(end) != Kind.WELL), key=lambda end: (kind(end), end.at), default=None)


def count_lost(ends: Iterable[End]) -> int:
    """Counts the processes to continue without: the guilty one, and others killed from outside."""
    ends = tuple(ends)
    first = find_guilty(ends)
    if first is None or kind(first) not in (Kind.CRASHED, Kind.STALLED):
        return 0
    # Survivors of a broken collective end in many ways (an exception, SIGABRT), so no others count.
    return len({first.task, *(end.task for end in ends if end.code == -signal.SIGKILL and end.sent is None)})


def exit_code(end: End) -> int:
    """Computes the launcher's exit code after `end`: the same, or 128 plus the signal's number as in shells."""
    return end.code if end.code >= 0 else 128 - end.code


def restart_may_help(end: End) -> bool:
    """Returns whether a restart may help; not after a usage error, on a full disk, or for a program that cannot be started."""
    return end.code not in (USAGE, CANNOT_WRITE, *_CANNOT_BE_STARTED)


def describe(end: End) -> str:
    """Describes an end, as the predicate to its task."""
    meaning = kind(end)
    if meaning == Kind.STALLED:
        return "did not end and had to be killed"
    if end.code < 0:
        number = -end.code  # real-time signals have no name
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return f"was killed by {name}"
    remark = {Kind.PEER_LOST: " (it lost a peer)", Kind.LEFT: " (asked to stop, not by the launcher)"}
    more = " (a disk is full, or may not be written)" if end.code == CANNOT_WRITE else remark.get(meaning, "")
    return f"ended with exit code {end.code}{more}"


def explanation(stderr: str, *, killed: bool = False) -> list[str]:
    """Finds the last traceback, or else the last lines, of a process's standard error."""
    lines = [line.rstrip() for line in _own(stderr).splitlines()]
    header = _last_traceback(lines)
    if header is None:
        lines = [line for line in lines if line]
        if killed and not any(map(_is_message, lines)):
            return []
        reasons = [line for line in _without_noise(lines) if not _NO_REASON.match(line)]
        return (reasons or lines)[-LINES_WITHOUT:]
    start = _message(lines, header)
    frames, message = lines[header:start], lines[start : start + LINES_WITHOUT]
    # A long traceback keeps its beginning and its end, a long message its beginning.
    if len(frames) + len(message) > LONGEST:
        kept = LONGEST - len(message) - 1
        first = kept // 3
        frames = [*frames[:first], f"  ... {len(frames) - kept} lines left out ...", *frames[first - kept :]]
    while message and not message[-1]:
        message.pop()
    return frames + message


def lost_peer(stderr: str) -> tuple[int, str] | None:
    """Finds the process that this one reports as lost, and the cause; None without a report."""
    for line in reversed(stderr.splitlines()):
        if line.startswith(RECORD):
            try:
                match json.loads(line.removeprefix(RECORD)):
                    case {"process": int(process), "cause": str(why)}:
                        return process, why
            except ValueError:  # cut off
                return None
    return None


def cause(stderr: str, *, killed: bool = False) -> str:
    """Finds the line that says most: of the exception, else jdist's last one, else the last one; or ""."""
    # The last lines of a process that was killed from outside are those of its work.
    lines = _own(stderr).splitlines()
    header = _last_traceback(lines)
    if header is not None:
        message = _message(lines, header)
        return lines[message].strip("| ") if message < len(lines) else ""
    lines = [line.strip() for line in lines if line.strip()]
    reasons = list(filter(_is_message, lines))
    return (reasons or ([] if killed else _without_noise(lines) or lines) or [""])[-1]


def _is_message(line: str) -> bool:
    return line.startswith(_MESSAGE) and not _NO_REASON.match(line)


def _own(stderr: str) -> str:
    """Cuts out warnings, and what JAX writes as it ends a process, unless that is all."""
    stderr = _WARNING.sub("", stderr)
    own = _ENDED_BY_JAX.split(stderr)[0]
    return own if own.strip() else stderr


def _last_traceback(lines: list[str]) -> int | None:
    """Finds the last traceback's header."""
    return max((n for n, line in enumerate(lines) if _HEADER.match(line)), default=None)


def _without_noise(lines: list[str]) -> list[str]:
    return [line for line in lines if not _NOISE.match(line)]


def _message(lines: list[str], header: int) -> int:
    """Finds the line after the frames, which are indented; in a group behind a bar."""
    group = lines[header].lstrip().startswith("+")
    for n in range(header + 1, len(lines)):
        line = lines[n].lstrip().removeprefix("| ") if group else lines[n]
        if line and line[0] not in " \t":
            return n
    return len(lines)


def failure(attempt: Attempt, log_of: Callable[[Task], object], stderr: str) -> str:
    """Reports a failed attempt: the guilty process, its end and log, and the `explanation` in its standard error."""
    if attempt.guilty is None:
        return ""
    task, blame = _blame(attempt, attempt.guilty, stderr)
    head = f"attempt {attempt.number} failed: {blame}; its log: {log_of(task)}"
    return "\n".join([head, *(f"  {line}" for line in explanation(stderr, killed=attempt.guilty.was_killed))])


def verdict(attempt: Attempt, guilty: End, stderr: str) -> str:
    """Says in one line which process ended a job, since when, and what to do."""
    blame = _blame(attempt, guilty, stderr)[1]
    why = "" if kind(guilty) == Kind.PEER_LOST else cause(stderr, killed=guilty.was_killed)
    blame += f": {why.removesuffix('.')}" if why else ""
    remedy = "Look at its log, mend the cause, and start the job again; it goes on from its last checkpoint."
    if guilty.code in (USAGE, CANNOT_WRITE):
        remedy = "Another start would end in the same way: mend this first."
    return f"the job failed {attempt.duration_s:.0f} s after attempt {attempt.number} began: {blame}. {remedy}"


def _blame(attempt: Attempt, end: End, stderr: str) -> tuple[Task, str]:
    """Finds the task to blame, and says what happened to it."""
    task, predicate = end.task, f"{describe(end)}{_others(attempt, end)}"
    name = str(task)
    if end.code == -signal.SIGABRT and _ENDED_BY_JAX.search(stderr):
        predicate = f"was ended by JAX (SIGABRT), as process 0, or its machine, was gone{_others(attempt, end)}"
    if kind(end) == Kind.PEER_LOST and (peer := lost_peer(stderr)) is not None:
        # All have left with the same code, and the first to leave is not the one that they blame.
        lost, why = peer
        task = next((each.task for each in attempt.ends if each.task == Task(WORKER, lost)), end.task)
        name, predicate = f"process {lost}", f"was lost: {why}"
    return task, f"{name} {predicate}"


def summary(history: Sequence[Attempt], causes: Mapping[int, str]) -> str:
    """Reports each attempt in a line, with its cause if it failed, and a crash loop; "" after one attempt."""
    if len(history) == 1 and not history[0].lost:  # its failure has been reported
        return ""
    return "\n".join([*(_line(attempt, causes) for attempt in history), *_crash_loop(history, causes)])


def _crash_loop(history: Sequence[Attempt], causes: Mapping[int, str]) -> list[str]:
    """Names the cause if several attempts in a row failed alike, soon after their start."""
    last = history[-1]
    if last.guilty is None:
        return []

    def is_alike(attempt: Attempt) -> bool:
        if attempt.guilty is None or last.guilty is None or attempt.duration_s >= QUICK_S:
            return False
        return attempt.guilty.code == last.guilty.code and causes.get(attempt.number) == causes.get(last.number)

    loop = list(itertools.takewhile(is_alike, reversed(history)))
    if len(loop) < 2:
        return []
    longest = max(attempt.duration_s for attempt in loop)
    why = causes.get(last.number) or "it said nothing on its standard error"
    return [f"crash loop: {len(loop)} attempts in a row failed alike within {longest:.1f} s of their start: {why}"]


def _line(attempt: Attempt, causes: Mapping[int, str]) -> str:
    processes = f"{attempt.size} process{'es' if attempt.size > 1 else ''}"
    worlds = f", {attempt.lost} lost, {attempt.worlds} worlds" if attempt.lost else ""
    head = f"attempt {attempt.number}: {processes}, {attempt.duration_s:.1f} s{worlds}: "
    if attempt.guilty is None:
        meaning = {"grown": "stopped, to go on with more", "stopped": "stopped as asked"}
        return head + meaning.get(attempt.outcome, attempt.outcome)
    why = causes.get(attempt.number)
    return f"{head}{attempt.guilty.task} {describe(attempt.guilty)}{f': {why}' if why else ''}"


def _others(attempt: Attempt, guilty: End) -> str:
    stalled = [end.task for end in attempt.ends if kind(end) == Kind.STALLED and end.task != guilty.task]
    followed = sum(kind(end) == Kind.PEER_LOST and end.task != guilty.task for end in attempt.ends)
    parts = [f"{followed} noticed and left"] if followed else []
    if stalled:
        parts.append(f"{', '.join(map(str, stalled))} had to be killed")
    return f" ({'; '.join(parts)})" if parts else ""
