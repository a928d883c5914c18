"""From the end of a process's standard error, what explains its end. Pure."""

from __future__ import annotations

import re

_HEADER = re.compile(r"\s*(\+ Exception Group )?Traceback \(most recent call last\):")
# What XLA and its libraries write round an error of somebody else's: log lines of absl, banners, traces of their own.
_NOISE = re.compile(
    r"[IWEF]\d{4} \d\d:\d\d:\d\d|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.\d]*: [IWEF] |WARNING: (All log messages|Logging) before "
    r"|=== Source Location Trace|\*{3} |learning/|(external|third_party|xla|tsl)/\S+\.(cc|h):\d+|PC: @|\s*@\s+0x"
)
_SAID = "jdist: "  # how a message of jdist's begins; a record for programs, and a frame of a stack, do not explain
_NO_REASON = re.compile(r"jdist: (peer lost \{|    |process \d+, step )")
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
        return (_without_noise(lines) or lines)[-LINES_WITHOUT:]
    message = _message(lines, header)
    frames, said = lines[header:message], lines[message : message + LINES_WITHOUT]
    if len(frames) + len(said) > LONGEST:
        kept = LONGEST - len(said) - 1
        first = kept // 3
        frames = [*frames[:first], f"  ... {len(frames) - kept} lines left out ...", *frames[first - kept :]]
    while said and not said[-1]:
        said.pop()
    return frames + said


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
