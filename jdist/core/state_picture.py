"""A picture of a state on its devices, hosts and servers, as SVG and as text."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from jdist.errors import StepError
from jdist.support.svg import Svg, fit, kind, text_width, wrap
from jdist.support.units import counted, size

_WIDTH, _MARGIN, _GAP, _PAD = 868.0, 24.0, 10.0, 12.0
_BOX, _ROW, _BAR = 190.0, 18.0, 58.0
_MOST_PLACES, _MOST_GROUPS = 8, 3  # of one kind side by side, before they are counted instead
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Division:
    """Arrays of a state that are kept in one way."""

    how: str  # "whole on every device", "in 8 parts over replica"
    names: tuple[str, ...]  # of the arrays, the largest first
    num_bytes: int  # each array counted once, without padding
    part_bytes: int | None = None  # one device's part, with padding; None if parts differ
    noun: str = "array"  # names the counted things


@dataclass(frozen=True)
class Holding:
    """One place's part of a division."""

    division: int  # its number
    spans: tuple[tuple[float, float], ...]  # the parts, as shares from 0 to 1
    label: str  # their name, "part 3 of 8"
    num_bytes: int  # with padding


@dataclass(frozen=True)
class Place:
    """A device, the memory of a host, or a server."""

    name: str
    note: str = ""
    holdings: tuple[Holding, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the state that it holds."""
        return sum(each.num_bytes for each in self.holdings)

    @property
    def likeness(self) -> object:
        """Equal for places that hold the same amount of the same, whichever parts."""
        return tuple((each.division, each.num_bytes) for each in self.holdings)


@dataclass(frozen=True)
class Group:
    """A host, a process, a slice of a TPU: what has places or groups in it."""

    name: str
    members: tuple[Place | Group, ...]

    @property
    def likeness(self) -> object:
        """Equal for groups of the same form, whichever parts they hold."""
        return tuple(member.likeness for member in self.members)


@dataclass(frozen=True)
class More:
    """Members of a group that are counted, not shown."""

    members: tuple[Place | Group, ...]

    @property
    def lines(self) -> tuple[str, str]:
        """How many they are, and of which names."""
        first, last = self.members[0], self.members[-1]
        noun = first.name.split(" ")[0].split(":")[0] if isinstance(first, Group) else "device"
        inside = ""
        if isinstance(first, Group) and all(isinstance(each, Place) for each in first.members):
            inside = f" of {counted(len(first.members), 'device')}"
        return f"… {counted(len(self.members), f'more {noun}')}{inside}", f"{first.name} to {last.name}, alike"


@dataclass(frozen=True)
class StatePicture:
    """A state's parts on each device, host or server: a picture in a notebook, else text."""

    title: str
    summary: str  # its size, and each place's part, in words
    divisions: tuple[Division, ...]  # the ways in which arrays are kept
    groups: tuple[Group, ...]  # hosts or processes with their devices, or the servers
    refusal: str | None = None  # why the strategy refuses such a state

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture as an SVG file, whose name must end in ".svg"."""
        if not os.fspath(path).endswith(".svg"):
            raise StepError(f"the picture is SVG, and {os.fspath(path)!r} does not end in .svg.")
        Path(path).write_text(self._repr_svg_(), encoding="utf-8")

    def _repr_svg_(self) -> str:
        return str(_draw(self))

    def __str__(self) -> str:
        lines = [self.title, f"  {self.summary}"]
        if self.refusal is not None:
            lines.append(f"  Refused: {self.refusal}")
        lines += [f"  {_LETTERS[i % 26]}  {_described(each)}" for i, each in enumerate(self.divisions)]
        rows = list(_text_rows(self.groups, ""))
        widths = [max((len(row[i]) for row in rows if len(row) > 1), default=0) for i in range(3)]
        for row in rows:
            # The name of a group stands alone, however long it is.
            aligned = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)] if len(row) > 1 else []
            cells = [*aligned, *row[3:]] if aligned else row
            lines.append("  ".join(cell for cell in cells if cell).rstrip())
        return "\n".join(lines)

    __repr__ = __str__


def shown(members: Sequence[Place | Group]) -> list[Place | Group | More]:
    """Chooses what to show of a group's members: of many that are alike the first and the last, and a count of the others."""
    chosen: list[Place | Group | More] = []
    for _, run in groupby(members, key=lambda member: (type(member), member.likeness)):
        alike = tuple(run)
        most = _MOST_PLACES if isinstance(alike[0], Place) else _MOST_GROUPS
        head = 1 if isinstance(alike[0], Group) else 2
        if len(alike) <= most:
            chosen += alike
        else:
            chosen += [*alike[:head], More(alike[head:-1]), alike[-1]]
    return chosen


def _described(division: Division, names: int = 3) -> str:
    named = ", ".join(division.names[:names])
    others = f", … {len(division.names) - names:,} more" if len(division.names) > names else ""
    part = f", {size(division.part_bytes)} on each" if division.part_bytes not in (None, division.num_bytes) else ""
    return f"{division.how}: {counted(len(division.names), division.noun)}, {size(division.num_bytes)}{part} ({named}{others})"


def _text_rows(members: Sequence[Place | Group], indent: str) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for member in shown(members):
        if isinstance(member, More):
            rows.append((f"{indent}{', '.join(member.lines)}",))
        elif isinstance(member, Group):
            rows += [(f"{indent}{member.name}",), *_text_rows(member.members, indent + "  ")]
        else:
            holds = "  ".join(f"{_LETTERS[h.division % 26]} {_text_bar(h)}{h.label}" for h in member.holdings)
            total = size(member.num_bytes) if member.holdings else ""
            rows.append((f"{indent}{member.name}", member.note, total, holds))
    return rows


def _text_bar(holding: Holding) -> str:
    if holding.spans == ((0.0, 1.0),):
        return ""
    cells = 16
    filled = {
        cell
        for start, stop in holding.spans
        for cell in range(int(start * cells + 1e-6), max(int(start * cells + 1e-6) + 1, round(stop * cells)))
    }
    return "".join("#" if cell in filled else "." for cell in range(cells)) + " "


@dataclass(frozen=True)
class _Block:
    width: float
    height: float
    draw: Callable[[float, float], None]


def _draw(picture: StatePicture) -> Svg:
    svg = Svg(picture.title, str(picture), _WIDTH)
    y = 34.0
    svg.text(_MARGIN, y, fit(picture.title, _WIDTH - 2 * _MARGIN, "title"), "title")
    for words, style in (
        (picture.summary, "small soft"),
        (picture.refusal and f"Refused: {picture.refusal}", "small warn"),
    ):
        for line in wrap(words, _WIDTH - 2 * _MARGIN) if words else ():
            y += 18
            svg.text(_MARGIN, y, line, style)
    for i, division in enumerate(picture.divisions):
        y += 24
        svg.rect(_MARGIN, y - 12, 18, 16, kind(i), radius=3)
        svg.text(_MARGIN + 9, y, _LETTERS[i % 26], "small title", "middle")
        width = _WIDTH - 2 * _MARGIN - 28
        texts = [_described(division, names) for names in (3, 2, 1)]
        fitting = next((text for text in texts if text_width(text) <= width), fit(texts[-1], width))
        svg.text(_MARGIN + 28, y, fitting, "small")
    y += 18
    for block, (left, top) in _flow([_block(svg, group) for group in shown(picture.groups)], _WIDTH - 2 * _MARGIN):
        block.draw(_MARGIN + left, y + top)
        svg.height = max(svg.height, y + top + block.height + _MARGIN)
        svg.width = max(svg.width, left + block.width + 2 * _MARGIN)
    svg.height = max(svg.height, y)
    return svg


def _flow(blocks: Sequence[_Block], width: float) -> list[tuple[_Block, tuple[float, float]]]:
    """Places blocks in rows of a width, as words in lines."""
    placed: list[tuple[_Block, tuple[float, float]]] = []
    x = y = row = 0.0
    for block in blocks:
        if x and x + block.width > width + 0.5:
            x, y, row = 0.0, y + row + _GAP, 0.0
        placed.append((block, (x, y)))
        x, row = x + block.width + _GAP, max(row, block.height)
    return placed


def _block(svg: Svg, member: Place | Group | More, height: float = 0.0) -> _Block:
    if isinstance(member, More):
        return _more(svg, member, height)
    if isinstance(member, Place):
        return _place(svg, member, height)
    members = shown(member.members)
    tallest = max((_block(svg, each).height for each in members if not isinstance(each, Group)), default=0.0)
    blocks = [_block(svg, each, tallest) for each in members]
    room = _WIDTH - 2 * _MARGIN - 2 * _PAD
    placed = _flow(blocks, room)
    inner = max((left + block.width for block, (left, _) in placed), default=_BOX)
    tall = max((top + block.height for block, (_, top) in placed), default=0.0)

    def draw(x: float, y: float) -> None:
        svg.rect(x, y, inner + 2 * _PAD, tall + 42, "frame", radius=10)
        svg.text(x + _PAD, y + 19, fit(member.name, inner), "small soft")
        for block, (left, top) in placed:
            block.draw(x + _PAD + left, y + 30 + top)

    return _Block(inner + 2 * _PAD, tall + 42, draw)


def _place(svg: Svg, place: Place, height: float) -> _Block:
    tall = max(height, 30 + 17 * bool(place.note) + _ROW * len(place.holdings) + 4)

    def draw(x: float, y: float) -> None:
        svg.rect(x, y, _BOX, tall, "box", radius=6)
        total = size(place.num_bytes) if place.holdings else ""
        svg.text(x + 10, y + 20, fit(place.name, _BOX - 84 if total else _BOX - 20, "small title"), "small title")
        if total:
            svg.text(x + _BOX - 10, y + 20, total, "small soft", "end")
        if place.note:
            svg.text(x + 10, y + 37, fit(place.note, _BOX - 20), "small soft")
        top = y + 30 + 17 * bool(place.note)
        for i, holding in enumerate(place.holdings):
            _bar(svg, x + 10, top + _ROW * i, holding)

    return _Block(_BOX, tall, draw)


def _bar(svg: Svg, x: float, y: float, holding: Holding) -> None:
    svg.text(x, y + 11, _LETTERS[holding.division % 26], "small title")
    left = x + 14
    svg.rect(left, y + 2, _BAR, 11, "track", radius=2)
    for start, stop in holding.spans:
        # A part of 4,096 is seen as well: it is drawn wider than it is.
        width = max(2.5, (stop - start) * _BAR)
        svg.rect(left + min(start * _BAR, _BAR - width), y + 2, width, 11, kind(holding.division), radius=1)
    room = _BOX - _BAR - 38
    # How many parts there are stands above, too.
    label = holding.label if text_width(holding.label) <= room else holding.label.partition(" of ")[0]
    svg.text(left + _BAR + 7, y + 11, fit(label, room), "small")


def _more(svg: Svg, more: More, height: float) -> _Block:
    is_place = isinstance(more.members[0], Place)
    width = _BOX if is_place else _WIDTH - 2 * _MARGIN - 2 * _PAD
    tall = max(height, 46.0) if is_place else 46.0

    def draw(x: float, y: float) -> None:
        first, second = more.lines
        middle = y + tall / 2
        svg.text(x + width / 2, middle - 3, fit(first, width, "small title"), "small title", "middle")
        svg.text(x + width / 2, middle + 14, fit(second, width), "small soft", "middle")

    return _Block(width, tall, draw)
