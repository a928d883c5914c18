"""A plan as a picture: a device's memory by what takes it, and the step's time by what it goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from jdist.plan.plan import Plan
from jdist.plan.table import duration, show
from jdist.support.svg import MARGIN, BarPart, Svg
from jdist.support.words import size

_WIDTH, _BAR = 820.0, 26.0
_SMALL = 0.4  # a bar that fills less of the chip's memory is drawn once more, enlarged


class _Part(NamedTuple):
    name: str
    amount: float
    style: str


def draw(plan: Plan) -> Svg:
    """Draws a plan: a device's memory against what the chip has, and the step's time for each number of chips.

    Args:
        plan: of `jdist.plan.plan_config`.

    Returns:
        The picture, which a notebook shows; `str` is the SVG, `save(path)` writes it.

    Example:
        >>> import jdist
        >>> plan = jdist.plan.plan_config("configs/digits.yaml", "task.options.width=4", topology="cpu:8")
        >>> str(jdist.plan.draw(plan))[:4]
        '<svg'
    """
    title = (
        f"Plan for {plan.target}: {plan.num_devices:,} {plan.device_kind} devices, global batch {plan.global_batch:,}"
    )
    svg = Svg(title, show(plan), _WIDTH)
    bottom = svg.heading((plan.summary.replace("\n", "; "), "small soft"), most=3)
    bottom = _memory(svg, plan, bottom + 32)
    svg.height = _time(svg, plan, bottom + 34) + MARGIN
    return svg


def memory_parts(plan: Plan) -> list[_Part]:
    """Divides a device's memory by what takes it; together they are `plan.memory.total`, or what the compiler asked for."""
    optimizer = plan.optimizer_bytes
    parts = [
        _Part("parameters and what else the state has", plan.state_bytes - optimizer, "a"),
        _Part("optimiser's state", optimizer, "b"),
    ]
    if plan.memory is None:
        needed = 0 if plan.refusal is None or plan.refusal.needed is None else plan.refusal.needed
        known = 0 if plan.refusal is not None and plan.refusal.partly else plan.state_bytes
        return [*parts, _Part("what else the compiler asks for", max(0, needed - known), "c")]
    m = plan.memory
    # A compiler may keep an argument in fewer bytes than the report counts, but never in place of a batch.
    batch = max(0, m.arguments - plan.state_bytes)
    parts[0] = parts[0]._replace(amount=m.arguments - batch - optimizer)
    return [
        *parts,
        _Part("batch", batch, "d"),
        _Part("temporaries: activations, gradients, buffers", m.temporaries, "c"),
        _Part("outputs that replace no argument", m.outputs - m.aliased, "e"),
        _Part("program", m.code, "f"),
    ]


def _memory(svg: Svg, plan: Plan, top: float) -> float:
    parts = memory_parts(plan)
    total = sum(part.amount for part in parts)
    if plan.capacity is None:
        verdict = f"{_size(total)}; the memory of this device is not known"
    elif plan.fits is False:
        verdict = f"{_size(total)} of {size(plan.capacity)}: does not fit"
    else:
        verdict = f"{_size(total)} of {size(plan.capacity)}: fits, {_size(plan.capacity - total)} free"
    svg.text(MARGIN, top, "Memory of a device", "title")
    svg.text(_WIDTH - MARGIN, top, verdict, "small warn" if plan.fits is False else "small", "end")
    top += 26
    full = max(total, plan.capacity or 0) or 1
    width = _WIDTH - 2 * MARGIN
    _stack(svg, MARGIN, top, width, full, parts, _size)
    if plan.capacity is not None:
        at = MARGIN + width * plan.capacity / full
        svg.line(at, top - 5, at, top + _BAR + 5, "limit")
        svg.text(min(at, _WIDTH - MARGIN), top - 9, f"{size(plan.capacity)}, all there is", "small warn", "end")
    if 0 < total < _SMALL * full:
        top += _BAR + 20
        svg.text(MARGIN, top, "the same, enlarged", "small soft")
        top += 8
        _stack(svg, MARGIN, top, width, total, parts, _size)
    return _legend(svg, top + _BAR + 24, parts, _size, total)


def _time(svg: Svg, plan: Plan, top: float) -> float:
    svg.text(MARGIN, top, "Time of a step: a model, not a measurement", "title")
    if not plan.estimates:
        why = "nothing was compiled" if plan.memory is None else f"{plan.device_kind!r} has no public figures"
        svg.text(MARGIN, top + 24, f"no model: {why}", "small soft")
        return top + 24
    known = [each.step_s for each in plan.estimates if each.step_s is not None]
    most, left = max(known, default=1.0) or 1.0, MARGIN + 96
    width = _WIDTH - MARGIN - left - 76
    shown: list[_Part] = []
    for estimate in plan.estimates:
        top += _BAR + 10
        words = f"{estimate.chips:,} chip{'s' * (estimate.chips > 1)}"
        is_planned = estimate.chips == plan.num_devices
        svg.text(left - 10, top + 4, words, "small title" if is_planned else "small", "end")
        bar = top - _BAR / 2
        if estimate.step_s is None:
            svg.track(left, bar, width, _BAR, ())
            svg.text(left + 8, top + 4, "no public figure of the network, or of the host's link", "small soft")
            continue
        bound = "its memory's bandwidth" if estimate.bound == "memory" else "its arithmetic"
        parts = [
            _Part(f"the chip's own work, bound by {bound}", estimate.device_s, "a"),
            _Part("exchange between chips", estimate.exchange_s or 0.0, "c"),
            _Part("copies to and from the hosts", estimate.host_s or 0.0, "d"),
        ]
        _stack(svg, left, bar, width, most, parts, duration)
        svg.text(left + width + 8, top + 4, duration(estimate.step_s), "small title" if is_planned else "small")
        if is_planned or not shown:
            shown = parts
    planned = next((each for each in plan.estimates if each.chips == plan.num_devices), plan.estimates[-1])
    return _legend(svg, top + _BAR + 14, shown, duration, planned.step_s or 0.0) if shown else top


def _stack(
    svg: Svg,
    left: float,
    top: float,
    width: float,
    most: float,
    parts: Sequence[_Part],
    words: Callable[[float], str],
) -> None:
    """Draws a bar of parts that have `most` together where it is full, each with its amount where there is room."""
    lettered = _lettered(parts)
    ends = pairwise([0.0, *accumulate(part.amount / most for _, part in lettered)])
    spans = [
        BarPart(begin, end, part.style, f"{part.name}: {words(part.amount)}")
        for (begin, end), (_, part) in zip(ends, lettered, strict=True)
    ]
    svg.track(left, top, width, _BAR, spans, least=1.0)
    for span, (letter, part) in zip(spans, lettered, strict=True):
        ends = left + span.begin * width, left + span.end * width
        svg.inside(*ends, top + _BAR / 2 + 4, f"{letter}: {words(part.amount)}", letter)


def _size(amount: float) -> str:
    return size(int(amount))


def _lettered(parts: Sequence[_Part]) -> list[tuple[str, _Part]]:
    """Gives each part that takes anything a letter, so that it is known without its colour."""
    return list(zip("ABCDEFGH", (part for part in parts if part.amount > 0), strict=False))


def _legend(svg: Svg, top: float, parts: Sequence[_Part], words: Callable[[float], str], total: float) -> float:
    for letter, part in _lettered(parts):
        share = f"{part.amount / total:.1%}" if total else ""
        svg.key(MARGIN, top, part.style, letter, part.name)
        svg.text(MARGIN + 430, top, words(part.amount), "small", "end")
        svg.text(MARGIN + 490, top, share, "small soft", "end")
        top += 20
    return top - 14
