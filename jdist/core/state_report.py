"""A state on its devices, hosts and servers: as text, as a table and as a picture."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from jdist.errors import StepError
from jdist.support.leaves import Leaf, table_of
from jdist.support.svg import MARGIN, BarPart, Svg, fit, kind, text_width
from jdist.support.table import Table
from jdist.support.words import counted, size

_WIDTH, _INDENT, _ROW = 868.0, 14.0, 20.0
_NOTE, _TOTAL, _BARS = 150.0, 400.0, 416.0  # where a place's note begins, its bytes end, and its bars begin
_MOST_BARS = 4  # side by side
# Of a run of places that are alike: so many are shown, else so many before the count of the others.
_MOST_DEVICES, _FIRST_DEVICES, _MOST_GROUPS, _FIRST_GROUPS = 8, 2, 3, 1
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
WHOLE = ((0.0, 1.0),)


@dataclass(frozen=True)
class Holding:
    """One place's part of the arrays that are kept in one way."""

    way: int  # its number
    spans: tuple[tuple[float, float], ...]  # the parts, as shares from 0 to 1
    label: str  # their name, "part 3 of 8"
    num_bytes: int  # with padding


@dataclass(frozen=True)
class Place:
    """A device, the memory of a host, a server; or a host, a process or a slice of a TPU, with the places in it."""

    name: str
    note: str = ""
    holdings: tuple[Holding, ...] = ()
    places: tuple[Place, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the state that it holds by itself."""
        return sum(each.num_bytes for each in self.holdings)

    @property
    def likeness(self) -> object:
        """Equal for places that hold the same amount of the same, whichever parts."""
        held = tuple((each.way, each.num_bytes) for each in self.holdings)
        return held, tuple(place.likeness for place in self.places)


@dataclass(frozen=True)
class StateReport:
    """Each place's part of a state: `print` it, or show it in a notebook, with a picture; `save` keeps the picture."""

    title: str
    summary: str  # the state's size, and each place's part, in words
    leaves: Sequence[Leaf]  # in the order of the state
    ways: Sequence[str]  # the ways in which arrays are kept, each with the names of its arrays
    places: Sequence[Place]  # hosts or processes with their devices, or the servers
    refusal: str | None = None  # why the strategy refuses such a state

    @property
    def num_bytes(self) -> int:
        """Bytes of the state."""
        return sum(leaf.num_bytes for leaf in self.leaves)

    @property
    def bytes_per_device(self) -> int:
        """Bytes that each device holds of it."""
        return sum(leaf.bytes_per_device for leaf in self.leaves)

    @property
    def svg(self) -> Svg:
        """The picture."""
        return _draw(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture as an SVG file; its name must end in ".svg"."""
        if not os.fspath(path).endswith(".svg"):
            raise StepError(f"the picture is SVG, and {os.fspath(path)!r} does not end in .svg.")
        self.svg.save(path)

    def _heading(self) -> list[str]:
        return [self.title, self.summary, *([] if self.refusal is None else [f"Refused: {self.refusal}"])]

    def __str__(self) -> str:
        table = table_of(self.leaves, "").lines if self.leaves else []
        ways = [f"{_letter(i)}  {way}" for i, way in enumerate(self.ways)]
        return "\n".join(["\n  ".join([*self._heading(), *table, *ways]), *_text_rows(self.places)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"{self.svg}{table_of(self.leaves, self.title)._repr_html_() if self.leaves else ''}"


def in_words(how: str, leaves: Iterable[Leaf], part_bytes: int | None = None) -> str:
    """Describes the arrays that are kept in one way; `part_bytes` has a device of each."""
    largest = sorted(leaves, key=lambda leaf: -leaf.num_bytes)
    total = sum(leaf.num_bytes for leaf in largest)
    others = f", … {len(largest) - 3:,} more" if len(largest) > 3 else ""
    part = f", {size(part_bytes)} on each" if part_bytes not in (None, total) else ""
    named = ", ".join(leaf.path for leaf in largest[:3])
    return f"{how}: {counted(len(largest), 'array')}, {size(total)}{part} ({named}{others})"


def rows_of(places: Sequence[Place], depth: int = 0) -> Iterator[tuple[int, Place | str]]:
    """Lists places from the outside in, with their depth; of many that are alike most are counted in a line."""
    for _, run in groupby(places, key=lambda place: (bool(place.places), place.likeness)):
        alike = list(run)
        most, head = (_MOST_GROUPS, _FIRST_GROUPS) if alike[0].places else (_MOST_DEVICES, _FIRST_DEVICES)
        for i, place in enumerate(alike):
            if len(alike) <= most or i < head or i == len(alike) - 1:
                yield depth, place
                yield from rows_of(place.places, depth + 1)
            elif i == head:
                yield depth, _counted(alike[head:-1])


def _counted(alike: Sequence[Place]) -> str:
    first, inside = alike[0], ""
    noun = first.name.partition(" ")[0] if first.places else "device"
    if first.places and not any(each.places for each in first.places):
        inside = f" of {counted(len(first.places), 'device')}"
    return f"… {counted(len(alike), f'more {noun}')}{inside}, {first.name} to {alike[-1].name}, alike"


def _letter(way: int) -> str:
    return _LETTERS[way % len(_LETTERS)]


def _text_rows(places: Sequence[Place]) -> list[str]:
    rows = [(depth * "  ", each) for depth, each in rows_of(places)]
    cells = [
        (
            indent + place.name,
            place.note,
            size(place.num_bytes) if place.holdings else "",
            "  ".join(f"{_letter(each.way)} {_text_bar(each)}{each.label}" for each in place.holdings),
        )
        for indent, place in rows
        if isinstance(place, Place) and not place.places
    ]
    aligned = iter(Table("", cells).lines)
    # The name of a group stands alone, however long it is.
    return [
        f"{indent}{each if isinstance(each, str) else each.name}"
        if isinstance(each, str) or each.places
        else next(aligned)
        for indent, each in rows
    ]


def _text_bar(holding: Holding) -> str:
    if holding.spans == WHOLE:
        return ""
    cells = 16
    filled = {
        cell
        for start, stop in holding.spans
        for cell in range(int(start * cells + 1e-6), max(int(start * cells + 1e-6) + 1, round(stop * cells)))
    }
    return "".join("#" if cell in filled else "." for cell in range(cells)) + " "


def _draw(report: StateReport) -> Svg:
    svg = Svg(report.title, str(report), _WIDTH)
    _, summary, *refusal = report._heading()
    y = svg.heading((summary, "small soft"), *((each, "small warn") for each in refusal))
    for i, way in enumerate(report.ways):
        y += 24
        svg.key(MARGIN, y, kind(i), _letter(i), fit(way, _WIDTH - 2 * MARGIN - 28))
    rows = list(rows_of(report.places))
    most = max((len(each.holdings) for _, each in rows if isinstance(each, Place)), default=1)
    column = (_WIDTH - MARGIN - _BARS) / min(max(most, 1), _MOST_BARS)
    y += 8
    for depth, each in rows:
        y, x = y + _ROW, MARGIN + _INDENT * depth
        if isinstance(each, str):
            svg.text(x, y, fit(each, _WIDTH - MARGIN - x), "small soft")
        elif each.places:
            y += 6
            svg.text(x, y, fit(each.name, _WIDTH - MARGIN - x, "small title"), "small title")
        else:
            total = size(each.num_bytes) if each.holdings else ""
            svg.text(x, y, fit(each.name, _NOTE - x - 6, "small title"), "small title")
            svg.text(_NOTE, y, fit(each.note, _TOTAL - _NOTE - text_width(total) - 8), "small soft")
            svg.text(_TOTAL, y, total, "small soft", "end")
            for i, holding in enumerate(each.holdings):
                line, place = divmod(i, _MOST_BARS)
                _bar(svg, _BARS + column * place, y + _ROW * line, column - 10, holding)
            y += _ROW * (max(len(each.holdings) - 1, 0) // _MOST_BARS)
    svg.height = y + MARGIN
    return svg


def _bar(svg: Svg, x: float, y: float, width: float, holding: Holding) -> None:
    room = min(130.0, 0.45 * width)
    bar = width - room - 20
    svg.text(x, y, _letter(holding.way), "small title")
    style = kind(holding.way)
    svg.track(x + 14, y - 9, bar, 11, [BarPart(start, stop, style, holding.label) for start, stop in holding.spans])
    # How many parts there are stands above, too.
    label = holding.label if text_width(holding.label) <= room else holding.label.partition(" of ")[0]
    svg.text(x + 14 + bar + 6, y, fit(label, room), "small")
