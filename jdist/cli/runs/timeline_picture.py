"""A timeline as a picture: lanes of attempts, steps, evaluations, checkpoints and processes over time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from jdist.cli.runs.timeline import CHECKPOINT, EVALUATION, LOST, STARTUP, TRAIN, Timeline, describe, summary
from jdist.support.svg import MARGIN, BarPart, Svg, fit, text_width

_WIDTH, _LABELS = 900.0, 118.0
_LANE, _BAR = 28.0, 16.0
_MOST_PROCESSES, _MOST_MARKS = 12, 12  # of more marks the first and the last are shown
_MOST_NEAR = 4  # numbers of marks one below the other, where they are at almost the same time
_STYLES = {TRAIN: "a", CHECKPOINT: "b", EVALUATION: "d", STARTUP: "c", LOST: "lost"}
_LEGEND = (
    ("a", "steps"),
    ("lost", "done again: lost"),
    ("c", "start and compilation"),
    ("d", "evaluation"),
    ("b", "checkpoint"),
    ("f", "process"),
)
_UNITS = ((1.0, "s"), (60.0, "min"), (3600.0, "h"), (86400.0, "d"))


def draw(timeline: Timeline) -> Svg:
    """Draws a timeline."""
    svg = Svg(f"Timeline of {timeline.name}", str(timeline), _WIDTH)
    length = max(timeline.end - timeline.begin, 1e-3)
    left, width = MARGIN + _LABELS, _WIDTH - 2 * MARGIN - _LABELS

    def x(at: float) -> float:
        return left + (at - timeline.begin) / length * width

    top = _legend(svg, svg.heading((summary(timeline), "small soft")) + 22, timeline)
    bottom = top + (_steps(svg, timeline, top, x) if timeline.attempts else 36)
    for label, bars, texts in _lanes(timeline):
        middle = bottom + _LANE / 2
        svg.text(left - 10, middle + 4, fit(label, _LABELS - 14), "small", "end")
        svg.track(left, middle - _BAR / 2, width, _BAR, _visible(bars, 1 / width), least=1.5)
        for begin, end, words in texts:
            svg.inside(x(begin), x(end), middle + 4, words)
        bottom += _LANE
    hidden = len({p.name for p in timeline.processes}) - _MOST_PROCESSES
    if hidden > 0:
        svg.text(left, bottom + 12, f"… {hidden:,} more processes", "small soft")
        bottom += 20
    axis, bottom = bottom, _axis(svg, length, bottom, left, width)
    near: list[float] = []
    for mark, (at, words) in enumerate(_marks(timeline), start=1):
        near = [each for each in near if x(at) - each < 22]
        svg.line(x(at), top - 10 + 11 * len(near), x(at), axis, "limit")
        if len(near) < _MOST_NEAR:
            svg.text(min(x(at) + 3, left + width - 16), top + 11 * len(near), str(mark), "small warn")
            near.append(x(at))
        bottom += 18
        svg.text(MARGIN + 14, bottom, str(mark), "small warn", "end")
        svg.text(MARGIN + 22, bottom, fit(words, _WIDTH - 2 * MARGIN - 22), "small")
    svg.height = bottom + MARGIN
    return svg


def _legend(svg: Svg, y: float, timeline: Timeline) -> float:
    left = MARGIN
    shown = {_STYLES[span.part] for attempt in timeline.attempts for span in attempt.spans if span.part in _STYLES}
    for style, words in _LEGEND:
        if style in shown or (style == "f" and timeline.processes):
            svg.rect(left, y - 10, 14, 12, style, radius=2)
            svg.text(left + 20, y, words, "small soft")
            left += 40 + text_width(words)
    return y + 14


def _steps(svg: Svg, timeline: Timeline, top: float, x: Callable[[float], float]) -> float:
    """Draws the step over time; returns the height."""
    height, left = 64.0, MARGIN + _LABELS
    most = max(1, *(attempt.last for attempt in timeline.attempts))

    def y(step: int) -> float:
        return top + 14 + height - step / most * height

    svg.text(left - 10, y(most) + 4, f"step {most:,}", "small", "end")
    svg.text(left - 10, y(0) + 1, "0", "small", "end")
    svg.line(left, y(0), _WIDTH - MARGIN, y(0))
    for attempt in timeline.attempts:
        points = [(attempt.begin, attempt.first)]
        for span in attempt.spans:
            points += [(span.begin, span.first), (span.end, span.last)]
        points.sort()
        svg.curve(_thinned([(x(at), y(step)) for at, step in points]))
    return height + 26


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Leaves out points of a curve that are less than a pixel from the one before."""
    kept = [points[0]]
    for point in points[1:-1]:
        if abs(point[0] - kept[-1][0]) >= 1 or abs(point[1] - kept[-1][1]) >= 1:
            kept.append(point)
    return [*kept, points[-1]]


def _lanes(timeline: Timeline) -> Iterable[tuple[str, list[BarPart], list[tuple[float, float, str]]]]:
    length = max(timeline.end - timeline.begin, 1e-3)

    def bar(begin: float, end: float, style: str, hint: str) -> BarPart:
        return BarPart((begin - timeline.begin) / length, (end - timeline.begin) / length, style, hint)

    def bars(*parts: str) -> list[BarPart]:
        return [
            bar(s.begin, s.end, _STYLES[s.part], f"{s.part}, attempt {a.number}: step {s.first:,} to {s.last:,}")
            for a in timeline.attempts
            for s in a.spans
            if s.part in parts
        ]

    if timeline.attempts:
        attempts = [bar(a.begin, a.end, "f", describe(timeline, a)) for a in timeline.attempts]
        texts = [
            (a.begin, a.end, f"{a.number}: steps {a.first:,} to {a.last:,}, {a.outcome}") for a in timeline.attempts
        ]
        yield "attempts", attempts, texts
        yield "steps", bars(TRAIN, STARTUP, LOST), []
    for label, part in (("evaluations", EVALUATION), ("checkpoints", CHECKPOINT)):
        if found := bars(part):
            yield label, found, []
    for name in list(dict.fromkeys(process.name for process in timeline.processes))[:_MOST_PROCESSES]:
        lives = [(p.begin, timeline.end_of(p), p.how) for p in timeline.processes if p.name == name]
        yield name, [bar(begin, end, "f", how) for begin, end, how in lives], lives


def _visible(bars: Iterable[BarPart], pixel: float) -> list[BarPart]:
    """Joins bars of one style that are less than a pixel apart: of a long run there are more bars than pixels."""
    shown: list[BarPart] = []
    for bar in bars:
        before = shown[-1] if shown else None
        if before is not None and before.style == bar.style and bar.begin - before.end < pixel:
            hint = f"{before.hint.partition(' … ')[0]} … {bar.hint}"
            shown[-1] = before._replace(end=max(before.end, bar.end), hint=hint)
        else:
            shown.append(bar)
    return shown


def _marks(timeline: Timeline) -> list[tuple[float, str]]:
    """Lists what went wrong, or was asked for, in order of time."""
    marks: list[tuple[float, str]] = []
    for attempt in timeline.attempts:
        if attempt.outcome in ("killed", "failed", "preempted"):
            dead = [p for p in timeline.processes if p.attempt == attempt.number and p.code not in (0, None)]
            first = min(dead, key=lambda p: p.end or 0.0, default=None)
            why = "" if first is None else f" {first.name}: {first.how}."
            lost = f" {attempt.lost_steps:,} steps are done again." if attempt.lost_steps else ""
            text = f"attempt {attempt.number} {attempt.outcome} at step {attempt.last:,}.{why}{lost}"
            marks.append((attempt.end, text))
        if attempt.number:
            marks.append((attempt.begin, f"attempt {attempt.number} goes on from step {attempt.first:,}"))
    for process in timeline.processes:
        if process.attempt is None and process.end is not None and process.code != 0:
            marks.append((process.end, f"{process.name}: {process.how}"))
    marks += [(at, f"the launcher was sent {name}") for at, name in timeline.signals]
    marks.sort()
    return marks if len(marks) <= _MOST_MARKS else [*marks[: _MOST_MARKS // 2], *marks[-_MOST_MARKS // 2 :]]


def _axis(svg: Svg, length: float, bottom: float, left: float, width: float) -> float:
    """Draws ticks of time; returns where it ends."""
    unit, name = next(((u, n) for u, n in reversed(_UNITS) if length >= 2 * u), _UNITS[0])
    step = next(step for e in range(-4, 9) for step in (10.0**e, 2 * 10.0**e, 5 * 10.0**e) if length / unit / step <= 8)
    tick = 0
    while tick * step * unit <= length:
        at = left + tick * step * unit / length * width
        svg.line(at, bottom, at, bottom + 5)
        words = f"{tick * step:g} {name}"
        svg.text(min(at, left + width - text_width(words) / 2), bottom + 18, words, "small soft", "middle")
        tick += 1
    svg.line(left, bottom, left + width, bottom)
    return bottom + 26
