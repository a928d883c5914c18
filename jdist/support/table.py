"""Tables that `print` aligns and a notebook shows as HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

_NUMBER = re.compile(r"[-+]?\.?\d.*|[-+]?(?:inf|nan)|[-?]?")


@dataclass(frozen=True)
class Table:
    """Rows under a title; the first cell of each names it, and columns of numbers are set to the right."""

    title: str
    rows: Sequence[Sequence[object]]
    header: Sequence[str] = ()
    notes: Sequence[str] = ()  # lines below the rows

    def __str__(self) -> str:
        return "\n  ".join([self.title, *self.lines]) if self.title else "\n".join(self.lines)

    @property
    def lines(self) -> list[str]:
        """The rows, aligned, and the notes."""
        rows = [[str(cell) for cell in row] for row in self.rows]
        is_number = [i > 0 and all(map(_NUMBER.fullmatch, column)) for i, column in enumerate(zip(*rows, strict=True))]
        rows = [self.header, *rows] if self.header and rows else rows
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(row, widths, is_number, strict=True)
            ).rstrip()
            for row in rows
        ]
        return [*lines, *self.notes]

    def _repr_html_(self) -> str:
        parts = [f"<caption>{_escaped(self.title)}</caption>"] if self.title else []
        if self.header:
            parts.append(_row("th", self.header, "th"))
        parts += [_row("th", row, "td") for row in self.rows]
        return f"<table>{''.join(parts)}</table>{paragraph(*self.notes) if self.notes else ''}"


def paragraph(*lines: str) -> str:
    """Writes lines of text in HTML; escapes them."""
    return f"<p>{'<br>'.join(map(_escaped, lines))}</p>"


def _row(first: str, cells: Sequence[object], others: str) -> str:
    tags = [first] + [others] * (len(cells) - 1)
    return f"<tr>{''.join(f'<{tag}>{_escaped(cell)}</{tag}>' for tag, cell in zip(tags, cells, strict=True))}</tr>"


def _escaped(text: object) -> str:
    return html.escape(str(text)).replace("\n", "<br>")
