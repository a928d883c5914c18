"""The time of a run: the clock that divides it into parts, and `times.jsonl`, which has that of all its starts.

Each line of the file is a JSON object with the `step` that was reached, the `attempt` (starts of the run before this one)
and seconds since 1970:

    {"step": 0, "attempt": 0, "event": "begin", "at": 1800000000.0, "processes": 1, "devices": 8}
    {"step": 20, "attempt": 0, "part": "train", "begin": ..., "end": ..., "first": 0, "seconds": {"steps": 1.9, "input": 0.1}}
    {"step": 20, "attempt": 0, "part": "evaluation", "begin": ..., "end": ..., "first": 20, "seconds": {"evaluation": 0.5}}
    {"step": 40, "attempt": 0, "event": "end", "at": ..., "outcome": "finished"}

A part is "startup", "train", "evaluation" or "checkpoint". An attempt without an end was killed behind its last line.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jdist.errors import ConfigError
from jdist.loop.report.files import writing
from jdist.loop.report.metrics_file import SHARES, STARTUP, STEPS, MetricsFile, Row, read_rows
from jdist.support.checks import as_real

NAME = "times.jsonl"
Outcome = Literal["finished", "stopped", "interrupted", "preempted", "failed"]
_NUMBERS = {"begin": ("attempt", "at"), "part": ("attempt", "begin", "end", "first"), "end": ("attempt", "at")}
_MOST = 1e12  # steps, attempts, or seconds since 1970
_IS_OVER = ("finished", "stopped")
_ENDED_ON_PURPOSE = (*_IS_OVER, "interrupted")  # what comes behind is not lost, but was not wanted


class PartClock:
    """A stopwatch that counts each moment to one part."""

    # While the devices have a step to make, a moment counts to the steps; otherwise to the
    # program's current work. So waiting for data while the previous step still runs costs nothing,
    # and neither does a callback that ends before the step does. `idle_since` returns the time
    # since which the devices have had no step to make; None while they have one. `seconds` is up to
    # date after `settle`.

    def __init__(
        self,
        *,
        begun: float,
        clock: Callable[[], float] = time.monotonic,
        idle_since: Callable[[], float | None] = lambda: 0.0,
    ) -> None:
        self.begun, self._clock, self._idle_since = begun, clock, idle_since
        self.seconds = dict.fromkeys(SHARES, 0.0)
        self._part, self._since = STARTUP, begun
        self._open: list[tuple[str, float, float]] = []  # what the program did since the last `settle`

    def now(self) -> float:
        return self._clock()

    def enter(self, part: str) -> str:
        """Begins a part where the present one ends; returns that one."""
        now, before = self._clock(), self._part
        self._open.append((before, self._since, now))
        self._part, self._since = part, now
        return before

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Counts a block to a part, and goes on with the present one behind it."""
        before = self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def carve(self, part: str, seconds: float) -> None:
        """Counts the last `seconds` to a part, whatever they were counted to: for what is known when it is over."""
        now = self.now()
        self._open.append((self._part, self._since, now))
        self._since = cut = now
        while self._open and self._open[-1][2] > now - seconds:
            before, begin, _ = self._open.pop()
            cut = max(begin, now - seconds)
            if cut > begin:
                self._open.append((before, begin, cut))
                break
        self._open.append((part, cut, now))

    def settle(self) -> float:
        """Counts everything up to now, while it is still known when the devices had their last step; returns the time."""
        now = self._clock()
        self._open.append((self._part, self._since, now))
        self._since = now
        idle_since = self._idle_since()
        for part, begin, end in self._open:
            busy = end - begin if idle_since is None else min(max(idle_since - begin, 0.0), end - begin)
            self.seconds[STEPS] += busy
            self.seconds[part] += end - begin - busy
        self._open.clear()
        return now


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Divides each part's time by the total; empty if no time has passed."""
    total = sum(seconds.values())
    return {SHARES[part]: each / total for part, each in seconds.items()} if total > 0 else {}


class TimesFile:
    """The times of one attempt, after those of the attempts before it."""

    # `at` is the begin, in seconds since 1970. One process of a job writes, the others only read.
    # `trains`: there are steps left to make; an attempt without any, of a finished run, leaves no
    # trace. `about` goes into its first line.

    def __init__(
        self, folder: Path, *, step: int, at: float, writes: bool, trains: bool = True, about: Mapping[str, Any]
    ) -> None:
        path = folder / NAME
        self.earlier = read_times(folder)
        self._attempt = sum(line.get("event") == "begin" for line in self.earlier)
        self._file: MetricsFile | None = None
        has_ended = bool(self.earlier) and self.earlier[-1].get("outcome") in _IS_OVER
        if writes and (trains or not has_ended):
            with writing(path):
                folder.mkdir(parents=True, exist_ok=True)
            self._file = MetricsFile.begin(path, self.earlier)
            self._write(step, {"event": "begin", "at": at, **about})

    def add(self, part: str, *, begin: float, end: float, first: int, step: int, seconds: Mapping[str, float]) -> None:
        """Writes what the time from `begin` to `end` went to, in which the run came from step `first` to `step`."""
        spent = {name: round(each, 6) for name, each in seconds.items() if each >= 1e-6}
        times = {"begin": round(begin, 6), "end": round(end, 6)}
        self._write(step, {"part": part, **times, "first": first, "seconds": spent})

    def end(self, outcome: Outcome, *, at: float, step: int) -> None:
        """Writes the end of the attempt."""
        self._write(step, {"event": "end", "at": round(at, 6), "outcome": outcome})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, step: int, values: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(step, {"attempt": self._attempt, **values})


class Earlier:
    """The earlier attempts: how long they took, and the part of that which is still of use."""

    # `step` is that from which this attempt continues; later work is done again. `steps_s` are
    # seconds in steps that this attempt continues from. `wall_s` are seconds from the first begin
    # to this one, without those between an end on purpose and the next begin.

    def __init__(self, lines: Sequence[Row], *, step: int, at: float) -> None:
        kept: list[tuple[int, int, float]] = []  # first step, last step, seconds in them
        self.wall_s = 0.0
        last: float | None = None  # the time up to which is counted; None: from the next begin on

        def count_to(when: float) -> None:  # a clock that was set back between two starts takes no time away
            nonlocal last
            self.wall_s += 0.0 if last is None else max(when - last, 0.0)
            last = when

        for line in [*lines, {"event": "begin", "step": step, "at": at}]:
            match line:
                case {"event": "begin", "step": int(first), "at": int() | float() as when}:
                    kept = [_up_to(first, *each) for each in kept if each[1] <= first or each[0] < first]
                    count_to(when)
                case {"event": "end", "at": int() | float() as when, "outcome": outcome}:
                    count_to(when)
                    last = None if outcome in _ENDED_ON_PURPOSE else when
                case {"seconds": dict(seconds), "first": int(first), "step": int(done), "end": int() | float() as when}:
                    kept.append((first, done, seconds.get(STEPS, 0.0)))
                    count_to(when)
                case _:
                    pass  # of a newer jdist
        self.steps_s = sum(seconds for _, _, seconds in kept)


def _up_to(step: int, first: int, last: int, seconds: float) -> tuple[int, int, float]:
    """Cuts what was done behind a step off."""
    return (first, last, seconds) if last <= step else (first, step, seconds * (step - first) / (last - first))


def read_times(folder: str | os.PathLike[str]) -> list[Row]:
    """Reads the lines of a run folder's `times.jsonl`; none without the file."""
    path = Path(folder) / NAME
    lines = read_rows(path)
    for number, line in enumerate(lines, start=1):
        kind = "part" if "part" in line else line.get("event")
        if wrong := _wrong(line, str(kind)):
            raise ConfigError(f"{path}:{number}: {wrong}. Mend that line, or delete those of its attempt.")
    begun = {line["attempt"] for line in lines if line.get("event") == "begin"}
    if alone := [line["attempt"] for line in lines if line.get("attempt", 0) not in begun]:
        raise ConfigError(f"{path}: attempt {alone[0]} has no line that begins it. Delete the lines of that attempt.")
    return lines


def _wrong(line: Row, kind: str) -> str | None:
    """Says what a line lacks; None for one that is right, or of a kind that is not known here."""
    wrong = [name for name in _NUMBERS.get(kind, ()) if not _is_time(line.get(name))]
    if wrong:
        return f"has no number for {', '.join(wrong)}"
    if kind == "end" and not isinstance(line.get("outcome"), str):
        return 'an end has no "outcome"'
    seconds = line.get("seconds", {})
    if not isinstance(seconds, Mapping) or not all(map(_is_time, seconds.values())):
        return '"seconds" are not numbers by part'
    if kind == "part" and not isinstance(line["part"], str):
        return '"part" is not a name'
    return None


def _is_time(value: Any) -> bool:
    number = as_real(value)
    return number is not None and abs(number) < _MOST  # NaN is not
