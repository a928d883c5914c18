"""What a launch says of its failures, and at its end of all attempts. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from jdist.launcher.events import Attempt
from jdist.launcher.exit_cause import WORKER, End, Kind, Task, explanation, how, kind, lost_peer
from jdist.launcher.supervisor import QUICK_S


def failure(attempt: Attempt, log_of: Callable[[Task], object], stderr: str) -> str:
    """The first guilty process of an attempt: how it ended, its log, and its traceback or last words.

    Args:
        attempt: one that failed.
        log_of: from a process to its log file.
        stderr: the end of what the guilty process said.
    """
    end = attempt.guilty
    if end is None:
        return ""
    said = explanation(stderr)
    if kind(end) == Kind.PEER_LOST and (found := lost_peer(stderr)) is not None:
        # All have left with the same code, and whoever did so first is not the one that they blame.
        lost, why = found
        task = next((each.task for each in attempt.ends if each.task == Task(WORKER, lost)), end.task)
        head = f"attempt {attempt.number} failed: process {lost} was lost: {why}; its log: {log_of(task)}"
        return "\n".join([head, *(f"  {line}" for line in said)])
    log = log_of(end.task)
    others = _others(attempt, end)
    lines = [f"attempt {attempt.number} failed: {end.task} {how(end)}{others}; its log: {log}"]
    return "\n".join(lines + [f"  {line}" for line in said])


def summary(history: Sequence[Attempt], causes: Mapping[int, str]) -> str:
    """A line for each attempt, and what was the same in all if none got anywhere; empty after only one.

    Args:
        history: the attempts.
        causes: for those that failed, in a line what the guilty process said.
    """
    if len(history) == 1:  # if it failed, that was said
        return ""
    return "\n".join([*(_line(attempt, causes) for attempt in history), *crash_loop(history, causes)])


def crash_loop(history: Sequence[Attempt], causes: Mapping[int, str]) -> list[str]:
    """The line that names the cause, if several attempts in a row failed soon after their start in the same way."""
    last = history[-1]
    if last.guilty is None:
        return []
    alike = (last.guilty.code, causes.get(last.number))
    loop = list(
        itertools.takewhile(
            lambda a: (
                a.guilty is not None and a.duration_s < QUICK_S and (a.guilty.code, causes.get(a.number)) == alike
            ),
            reversed(history),
        )
    )
    if len(loop) < 2:
        return []
    longest = max(attempt.duration_s for attempt in loop)
    said = causes.get(last.number) or "it said nothing on its standard error"
    return [f"crash loop: {len(loop)} attempts in a row failed alike within {longest:.1f} s of their start: {said}"]


def _line(attempt: Attempt, causes: Mapping[int, str]) -> str:
    processes = f"{attempt.size} process{'es' if attempt.size > 1 else ''}"
    head = f"attempt {attempt.number}: {processes}, {attempt.duration_s:.1f} s: "
    if attempt.guilty is None:
        meaning = {"grown": "stopped, to go on with more", "stopped": "stopped as asked"}
        return head + meaning.get(attempt.outcome, attempt.outcome)
    said = causes.get(attempt.number)
    return f"{head}{attempt.guilty.task} {how(attempt.guilty)}{f': {said}' if said else ''}"


def _others(attempt: Attempt, guilty: End) -> str:
    stalled = [end.task for end in attempt.ends if kind(end) == Kind.STALLED and end.task != guilty.task]
    followed = sum(kind(end) == Kind.PEER_LOST and end.task != guilty.task for end in attempt.ends)
    parts = [f"{followed} noticed and left"] if followed else []
    if stalled:
        parts.append(f"{', '.join(map(str, stalled))} had to be killed")
    return f" ({'; '.join(parts)})" if parts else ""
