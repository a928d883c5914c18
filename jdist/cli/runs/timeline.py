"""The timeline of a run over all its attempts, read from what the run and its launcher have recorded."""

from __future__ import annotations

import dataclasses
import itertools
import math
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from jdist.cli.runs.summary import RUNS, near_run
from jdist.errors import ConfigError
from jdist.experiment.record import RunFolder
from jdist.launcher import record
from jdist.loop.report.metrics_file import read_rows, to_plain
from jdist.loop.report.times import NAME, read_times
from jdist.support.file_lock import is_held
from jdist.support.words import counted

TRAIN, STARTUP, EVALUATION, CHECKPOINT, LOST = "train", "startup", "evaluation", "checkpoint", "lost"


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of an attempt."""

    part: str  # "startup", "train", "evaluation", "checkpoint"; or "lost": a later attempt did these steps again
    begin: float  # in seconds since 1970
    end: float
    first: int  # steps done before it
    last: int  # steps done after it


@dataclass(frozen=True, kw_only=True)
class ProcessSpan:
    """The life of a process that a launcher started."""

    name: str  # "process 0", "evaluator", "ps 1"
    begin: float  # in seconds since 1970
    end: float | None = None  # None: unknown, or it runs
    code: int | None = None  # exit code, or minus the number of the signal that ended it
    attempt: int | None = None  # the run's attempt; None: one that did not come to train

    @property
    def how(self) -> str:
        """Describes its end, in words."""
        if self.code is None:
            return "end not recorded"
        if self.code >= 0:
            return f"exit code {self.code}"
        return f"killed by {_signal_name(-self.code)}"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a run."""

    number: int  # from 0
    begin: float  # in seconds since 1970
    end: float  # of a killed one, the last known time
    first: int  # the step from which it trained
    last: int  # the last step that it is known to have reached
    kept: int  # the last of its steps that the run continued from, or ended with; later ones were repeated
    # "finished", "stopped", "interrupted", "preempted", "failed", "running"; "killed": it wrote no end
    outcome: str
    spans: tuple[Span, ...]  # its parts in order, with lost steps separate

    @property
    def lost_steps(self) -> int:
        """Counts the steps of it that were done again."""
        return max(0, self.last - max(self.kept, self.first))

    @property
    def lost_s(self) -> float:
        """Seconds of steps that were done again."""
        return sum(span.end - span.begin for span in self.spans if span.part == LOST)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The events of a run, with their times."""

    name: str
    attempts: tuple[Attempt, ...]  # its starts, in order; empty for a launch of a program that is not a run of jdist
    processes: tuple[ProcessSpan, ...] = ()  # those of its launches, in order of their beginning
    signals: tuple[tuple[float, str], ...] = ()  # when the launcher was asked to stop, and by which signal

    @property
    def begin(self) -> float:
        """Returns the time when it began, in seconds since 1970."""
        return min([*(a.begin for a in self.attempts), *(p.begin for p in self.processes)])

    @property
    def end(self) -> float:
        """Returns the time when it ended, or the last known of it."""
        ends = [*(a.end for a in self.attempts), *(p.begin if p.end is None else p.end for p in self.processes)]
        return max([*ends, *(at for at, _ in self.signals)])

    @property
    def lost_steps(self) -> int:
        """Counts the steps that were done again."""
        return sum(attempt.lost_steps for attempt in self.attempts)

    @property
    def lost_s(self) -> float:
        """Seconds of steps that were done again."""
        return sum(attempt.lost_s for attempt in self.attempts)

    def end_of(self, process: ProcessSpan) -> float:
        """Returns the time when a process was gone; without a recorded end, the latest possible one."""
        if process.end is not None:
            return process.end
        return min(
            (p.begin for p in self.processes if p.name == process.name and p.begin > process.begin), default=self.end
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the timeline as plain values."""
        values = {"lost_steps": self.lost_steps, "lost_s": self.lost_s, "begin": self.begin, "end": self.end}
        values |= dataclasses.asdict(self)
        for row, attempt in zip(values["attempts"], self.attempts, strict=True):
            row |= {"lost_steps": attempt.lost_steps, "lost_s": attempt.lost_s}
        for row, process in zip(values["processes"], self.processes, strict=True):
            row["how"] = process.how
        return to_plain(values)

    def __str__(self) -> str:
        lines = [summary(self)]
        lines += [f"  {describe(self, attempt)}" for attempt in self.attempts]
        for process in self.processes:
            if process.attempt is None or process.code not in (0, None):
                lines.append(f"  {process.name}, {_after(process.begin, self)}: {process.how}")
        return "\n".join(lines)


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def summary(timeline: Timeline) -> str:
    """Says in a line what happened."""
    if not timeline.attempts:
        return (
            f"{timeline.name}: {len(timeline.processes):,} process{'' if len(timeline.processes) == 1 else 'es'} in "
            f"{timeline.end - timeline.begin:,.1f} s; none of them has recorded steps"
        )
    last = timeline.attempts[-1]
    restarts = len(timeline.attempts) - 1
    lost = (
        f", {counted(timeline.lost_steps, 'step')} done again ({timeline.lost_s:,.1f} s)" if timeline.lost_steps else ""
    )
    return (
        f"{timeline.name}: {last.last:,} steps in {timeline.end - timeline.begin:,.1f} s of wall time, "
        f"{counted(restarts, 'restart')}{lost}; {last.outcome}"
    )


def describe(timeline: Timeline, attempt: Attempt) -> str:
    """Says in a line what an attempt did."""
    lost = f"; {attempt.lost_steps:,} of these were repeated later" if attempt.lost_steps else ""
    return (
        f"attempt {attempt.number}, {_after(attempt.begin, timeline)} for {attempt.end - attempt.begin:,.1f} s: "
        f"steps {attempt.first:,} to {attempt.last:,}{lost}; {attempt.outcome}"
    )


def _after(at: float, timeline: Timeline) -> str:
    return f"after {at - timeline.begin:,.1f} s"


def read_timeline(path: Path) -> Timeline:
    """Reads the timeline of a run folder, a folder of `fit`'s checkpoints, or launch logs."""
    if not path.is_dir():
        raise ConfigError(
            f"{path}: no such run.{near_run(path)} Give the folder of a run, of a launch's logs, or a name in {RUNS}/."
        )
    lines = read_times(path)
    if not lines and not (path / record.NAME).is_file():
        raise ConfigError(
            f"{path}: has no record of times: neither {NAME}, of a run that has begun to train, nor "
            f"{record.NAME}, of `jdist launch`. A run writes it from its first step on."
        )
    begins = [line for line in lines if line.get("event") == "begin"]
    launches = list(dict.fromkeys(line["launch"] for line in begins if "launch" in line))
    folders = {each: path / each for each in launches} or {"": path}
    processes: list[ProcessSpan] = []
    signals: list[tuple[float, str]] = []
    for launch, folder in folders.items():
        own = [line for line in begins if line.get("launch") == launch]
        # A launch without its logs has no events.
        for events, begin, end in _launches(read_rows(folder / record.NAME, needs={"at": Real, "event": str})):
            attempts = {line["launch_attempt"]: line["attempt"] for line in own if begin <= line["at"] < end}
            signals += [(event["at"], event["signal"]) for event in events if event["event"] == "signal"]
            processes += _processes(events, attempts)
    has_ended = not lines or lines[-1].get("event") == "end"
    is_running = is_held(RunFolder(path).lock) or (not has_ended and _is_saved_to(path))
    logged = max((row["step"] for row in read_rows(RunFolder(path).metrics)), default=0)
    return Timeline(
        name=path.name,
        attempts=tuple(_attempts(lines, processes, logged, is_running=is_running)),
        processes=tuple(sorted(processes, key=lambda p: p.begin)),
        signals=tuple(signals),
    )


def _is_saved_to(path: Path) -> bool:
    """Returns whether a `jdist.fit` goes on that saves to a folder."""
    if not (path / ".job").is_file():
        return False
    from jdist.checkpoint.locks import is_claimed  # brings JAX

    return is_claimed(path)


def _launches(events: Sequence[dict[str, Any]]) -> Iterator[tuple[Sequence[dict[str, Any]], float, float]]:
    """Divides a record among the launches with these logs, each with the time from its beginning to that of the next."""
    firsts = [i for i, event in enumerate(events) if event["event"] == "launch"][1:]
    times = [-math.inf, *(events[i]["at"] for i in firsts), math.inf]
    for (first, last), begin, end in zip(itertools.pairwise([0, *firsts, len(events)]), times, times[1:], strict=False):
        yield events[first:last], begin, end


def _processes(events: Iterable[Mapping[str, Any]], attempts: Mapping[int, int]) -> list[ProcessSpan]:
    """Pairs the beginnings and ends of a launch's processes."""
    found: list[ProcessSpan] = []
    running: dict[str, int] = {}  # a server may end in a later attempt
    for event in events:
        if event["event"] == "process":
            label, attempt = event["process"], event["attempt"]
            running[label] = len(found)
            name = f"process {label}" if label.isdigit() else label
            found.append(ProcessSpan(name=name, begin=event["at"], attempt=attempts.get(attempt)))
        elif event["event"] == "end" and event["process"] in running:
            place = running.pop(event["process"])
            found[place] = dataclasses.replace(found[place], end=event["at"], code=event["code"])
    return found


def _attempts(
    lines: Sequence[Mapping[str, Any]], processes: Sequence[ProcessSpan], logged: int, *, is_running: bool
) -> Iterator[Attempt]:
    """Makes the attempts of their lines; `logged` is the step of the last row, which the newest attempt came to as well."""
    newest = max((line["attempt"] for line in lines if "attempt" in line), default=None)
    begins = {line["attempt"]: line for line in lines if line.get("event") == "begin"}
    for number in sorted(begins):
        begin, first = begins[number]["at"], begins[number]["step"]
        later = [line for each, line in begins.items() if each > number]
        own = [line for line in lines if line.get("attempt") == number]
        end = next((line for line in own if line.get("event") == "end"), None)
        spans = [
            Span(part=x["part"], begin=x["begin"], end=x["end"], first=x["first"], last=x["step"])
            for x in own
            if "part" in x
        ]
        is_last, timed = number == newest, max(line["step"] for line in own)
        last = max(timed, logged) if is_last and end is None else timed
        kept = min([last, *(line["step"] for line in later)])
        until = min([math.inf, *(line["at"] for line in later)])  # servers outlive an attempt
        gone = [p.end for p in processes if p.attempt == number and p.end is not None and p.end <= until]
        known = max([begin, *(span.end for span in spans)])
        ended = end["at"] if end is not None else max([known, *gone])
        outcome = end["outcome"] if end is not None else "running" if is_last and is_running else "killed"
        cut = [each for span in spans for each in _split(span, kept)]
        if outcome == "killed" and ended > known:  # what it did behind its last line is lost, whatever it was
            cut.append(Span(part=LOST, begin=known, end=ended, first=timed, last=last))
        yield Attempt(
            number=number,
            begin=begin,
            end=ended,
            first=first,
            last=last,
            kept=max(first, kept) if last > first else first,
            outcome=outcome,
            spans=tuple(cut),
        )


def _split(span: Span, kept: int) -> Iterator[Span]:
    """Cuts what was done again off a span of steps."""
    # A start comes before any step, and most of it is not the step.
    if span.part != TRAIN or span.last <= kept or span.last == span.first:
        yield span
        return
    cut = span.begin + (span.end - span.begin) * max(0, kept - span.first) / (span.last - span.first)
    if span.first < kept:
        yield dataclasses.replace(span, end=cut, last=kept)
    yield dataclasses.replace(span, part=LOST, begin=cut, first=max(span.first, kept))
