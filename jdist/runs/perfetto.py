"""A timeline as a trace that https://ui.perfetto.dev and chrome://tracing open: the Trace Event Format, in JSON."""

from __future__ import annotations

from typing import Any

from jdist.runs.timeline import CHECKPOINT, EVALUATION, LOST, Timeline, describe

Event = dict[str, Any]
_RUN = 1  # the number of the run among the trace's processes; those of the job follow
_LANES = {"attempts": 1, "time": 2, "evaluations": 3, "checkpoints": 4, "steps done again": 5}
_LANE_OF = {EVALUATION: "evaluations", CHECKPOINT: "checkpoints", LOST: "steps done again"}


def trace(timeline: Timeline) -> dict[str, Any]:
    """Makes the trace of a run's timeline, in the Trace Event Format."""
    # It has complete events ("X") of attempts, parts and processes, a counter ("C") of steps,
    # instants ("i") of restarts, kills and signals, and metadata ("M") with the names. Times are in
    # microseconds from the beginning. See
    # https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

    def us(at: float) -> int:
        return round((at - timeline.begin) * 1e6)

    events: list[Event] = [_name("process_name", _RUN, 0, f"run {timeline.name}")]
    events += [_name("thread_name", _RUN, lane, name) for name, lane in _LANES.items()]
    for attempt in timeline.attempts:
        lane = {"pid": _RUN, "tid": _LANES["attempts"]}
        args = {
            "first_step": attempt.first,
            "last_step": attempt.last,
            "kept_step": attempt.kept,
            "steps_done_again": attempt.lost_steps,
            "outcome": attempt.outcome,
        }
        name = f"attempt {attempt.number}: {attempt.outcome}"
        length = us(attempt.end) - us(attempt.begin)
        events.append(
            {"name": name, "cat": "attempt", "ph": "X", "ts": us(attempt.begin), "dur": length, **lane, "args": args}
        )
        if attempt.number:
            text = f"restart from step {attempt.first:,}"
            events.append(
                {"name": text, "cat": "restart", "ph": "i", "s": "g", "ts": us(attempt.begin), **lane, "args": {}}
            )
        if attempt.outcome in ("killed", "failed"):
            text = describe(timeline, attempt)
            events.append(
                {
                    "name": attempt.outcome,
                    "cat": "end",
                    "ph": "i",
                    "s": "g",
                    "ts": us(attempt.end),
                    **lane,
                    "args": {"what": text},
                }
            )
        for span in attempt.spans:
            lane = {"pid": _RUN, "tid": _LANES[_LANE_OF.get(span.part, "time")]}
            args = {"first_step": span.first, "last_step": span.last, "attempt": attempt.number}
            length = us(span.end) - us(span.begin)
            events.append(
                {"name": span.part, "cat": "part", "ph": "X", "ts": us(span.begin), "dur": length, **lane, "args": args}
            )
            counter = {"ph": "C", "cat": "steps", "pid": _RUN, "tid": 0, "name": "step"}
            events.append({**counter, "ts": us(span.end), "args": {"step": span.last}})
    for number, name in enumerate(dict.fromkeys(process.name for process in timeline.processes), start=_RUN + 1):
        events += [_name("process_name", number, 0, name), _name("thread_name", number, 1, name)]
        for process in timeline.processes:
            if process.name != name:
                continue
            lane = {"pid": number, "tid": 1}
            end = timeline.end_of(process)
            args = {"code": process.code, "how": process.how, "attempt": process.attempt}
            length = us(end) - us(process.begin)
            events.append(
                {
                    "name": name,
                    "cat": "process",
                    "ph": "X",
                    "ts": us(process.begin),
                    "dur": length,
                    **lane,
                    "args": args,
                }
            )
            if process.code not in (0, None):
                events.append(
                    {"name": process.how, "cat": "end", "ph": "i", "s": "p", "ts": us(end), **lane, "args": args}
                )
    for at, name in timeline.signals:
        lane = {"pid": _RUN, "tid": _LANES["attempts"]}
        events.append({"name": name, "cat": "signal", "ph": "i", "s": "g", "ts": us(at), **lane, "args": {}})
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0)))
    other = {"run": timeline.name, "began_at": timeline.begin, "written_by": "jdist runs --timeline"}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
