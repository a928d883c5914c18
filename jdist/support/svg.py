"""Pictures in SVG: shapes in the drawings' style, which read in light and in dark, by colour and without."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import NamedTuple

# Scoped by the class of the root: a notebook puts the picture, and with it its style, into its own page.
_STYLE = """
.jd text{font:13px system-ui,sans-serif;fill:#1b2330}.jd .small{font-size:11.5px}.jd .title{font-weight:600}
.jd .soft{fill:#5b6675}.jd .warn{fill:#a4341a}.jd .ground{fill:#fbfcfe}
.jd .frame{fill:#f1f4f9;stroke:#97a3b4;stroke-dasharray:5 4}
.jd .box{fill:#fff;stroke:#97a3b4}.jd .track{fill:#e9edf3;stroke:#97a3b4}.jd .line{stroke:#97a3b4;fill:none}
.jd .limit{stroke:#a4341a;stroke-width:2;fill:none}.jd .lost{fill:url(#jd-lost);stroke:#a4341a}
.jd .a{fill:#7fb0f5;stroke:#3b77c8}.jd .b{fill:#8ccf97;stroke:#3d8f4c}.jd .c{fill:#f4b26b;stroke:#cf7a1c}
.jd .d{fill:#c9a3ea;stroke:#8a52bd}.jd .e{fill:#f0a3b5;stroke:#c04a68}.jd .f{fill:#c3cad4;stroke:#6d7a8d}
.jd .stripe{stroke:#a4341a;stroke-width:2}.jd .curve{stroke:#3b77c8;stroke-width:1.8;fill:none}
@media(prefers-color-scheme:dark){.jd text{fill:#e6ebf2}.jd .soft{fill:#a5b1c2}.jd .warn{fill:#ff9d84}.jd .ground{fill:#1c222c}
.jd .frame{fill:#242c38;stroke:#6d7a8d}.jd .box{fill:#2c3543;stroke:#6d7a8d}.jd .track{fill:#1c222c;stroke:#6d7a8d}
.jd .line{stroke:#6d7a8d}.jd .limit{stroke:#ff9d84}.jd .lost{stroke:#ff9d84}.jd .stripe{stroke:#ff9d84}
.jd .curve{stroke:#6ea3ee}
.jd .a{fill:#2f62ad;stroke:#6ea3ee}.jd .b{fill:#2f7a40;stroke:#63b873}.jd .c{fill:#9a5f1a;stroke:#e79a45}
.jd .d{fill:#6b3f96;stroke:#c79bee}.jd .e{fill:#92405a;stroke:#f08ba5}.jd .f{fill:#566274;stroke:#a5b1c2}}
"""
MARGIN = 24.0  # of a page
KINDS = ("a", "b", "c", "d", "e", "f")
_STRIPES = (
    '<defs><pattern id="jd-lost" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path class="stripe" d="M0 0V6"/></pattern></defs>\n'
)
_EM = {"": 13.0, "title": 13.5, "small": 11.5}
_NARROW, _WIDE = frozenset(" .,:;'|!ijltfI()[]{}/"), frozenset("mwMW@%")


def kind(number: int) -> str:
    """Returns the class of one of six colours; the last stands for all others."""
    return KINDS[min(number, len(KINDS) - 1)]


def text_width(words: str, style: str = "small") -> float:
    """Estimates the width of a text in pixels, rather too wide than too narrow."""
    em = max((_EM[name] for name in style.split() if name in _EM), default=_EM[""]) if "small" not in style else 11.5
    units = sum(0.36 if char in _NARROW else 0.9 if char in _WIDE else 0.6 for char in words)
    return em * units * (1.05 if "title" in style else 1.0)


def fit(words: str, width: float, style: str = "small") -> str:
    """Shortens a text to a width in pixels, with an ellipsis for the rest."""
    if text_width(words, style) <= width:
        return words
    while words and text_width(words + "…", style) > width:
        words = words[:-1]
    return words.rstrip() + "…"


def wrap(words: str, width: float, style: str = "small") -> list[str]:
    """Breaks a text between words into lines of at most a width in pixels."""
    lines: list[str] = []
    for word in words.split():
        if lines and text_width(f"{lines[-1]} {word}", style) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [fit(line, width, style) for line in lines]


class BarPart(NamedTuple):
    """A part of a bar."""

    begin: float  # as shares of the bar, from 0 to 1
    end: float
    style: str
    hint: str  # shown where a pointer rests on it


@dataclass
class Svg:
    """A picture in pixels, origin at the top left, y down."""

    title: str  # read out, and shown under a pointer
    description: str  # for readers who cannot see it
    width: float
    height: float = 0.0  # may be set after the shapes are drawn
    _shapes: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, style: str = "small", anchor: str = "start") -> None:
        """Writes a line of text on a baseline; `anchor` is "start", "middle" or "end"."""
        # Styles: "small", "title", "soft", "warn", or several of them.
        if not words:
            return
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._shapes.append(f'<text class="{style}" x="{_n(x)}" y="{_n(y)}"{where}>{escape(words)}</text>')

    def rect(self, x: float, y: float, w: float, h: float, style: str, *, radius: float = 0, hint: str = "") -> None:
        """Draws a rectangle; `hint` is shown where a pointer rests on it."""
        corners = f' rx="{_n(radius)}"' if radius else ""
        inside = f"><title>{escape(hint)}</title></rect>" if hint else "/>"
        self._shapes.append(
            f'<rect class="{style}" x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}"{corners}{inside}'
        )

    def heading(self, *lines: tuple[str, str], most: int = 9) -> float:
        """Writes the title and lines, each a text and its style, and breaks long ones; returns the last baseline."""
        y, width = 34.0, self.width - 2 * MARGIN
        self.text(MARGIN, y, fit(self.title, width, "title"), "title")
        for words, style in lines:
            for each in wrap(words, width)[:most]:
                y += 18
                self.text(MARGIN, y, each, style)
        return y

    def key(self, x: float, y: float, style: str, letter: str, words: str) -> None:
        """Explains a colour and its letter."""
        self.rect(x, y - 12, 18, 16, style, radius=3)
        self.text(x + 9, y, letter, "small title", "middle")
        self.text(x + 28, y, words, "small")

    def track(self, x: float, y: float, w: float, h: float, spans: Iterable[BarPart], least: float = 2.5) -> None:
        """Draws a bar and the parts of it, each at least so wide that it is seen."""
        self.rect(x, y, w, h, "track", radius=3)
        for span in spans:
            width = max(least, (span.end - span.begin) * w)
            self.rect(x + min(span.begin * w, w - width), y, width, h, span.style, radius=1, hint=span.hint)

    def inside(self, begin: float, end: float, y: float, *texts: str) -> None:
        """Writes the first of some texts that fits between two places, in their middle."""
        if fitting := next((words for words in texts if text_width(words) < end - begin - 6), None):
            self.text((begin + end) / 2, y, fitting, "small", "middle")

    def line(self, x: float, y: float, to_x: float, to_y: float, style: str = "line") -> None:
        """Draws a straight line."""
        self._shapes.append(f'<path class="{style}" d="M{_n(x)} {_n(y)}L{_n(to_x)} {_n(to_y)}"/>')

    def curve(self, points: Sequence[tuple[float, float]], style: str = "curve") -> None:
        """Draws a line through points."""
        path = "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        self._shapes.append(f'<path class="{style}" d="M{path}"/>')

    def __str__(self) -> str:
        width, height = _n(self.width), _n(self.height)
        shapes = "\n".join(self._shapes)
        stripes = _STRIPES if 'class="lost"' in shapes else ""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="jd" viewBox="0 0 {width} {height}" role="img" '
            f'width="{width}" height="{height}"><title>{escape(self.title)}</title>\n'
            f"<desc>{escape(self.description)}</desc>\n<style>{_STYLE}</style>\n{stripes}"
            f'<rect class="ground" width="{width}" height="{height}" rx="12"/>\n{shapes}\n</svg>\n'
        )

    _repr_svg_ = __str__

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture; the folder must be there."""
        Path(path).write_text(str(self), encoding="utf-8")


def _n(number: float) -> str:
    """Writes a coordinate to a tenth of a pixel."""
    return f"{round(number, 1):g}"
