"""Tables and text in HTML, for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def table(rows: Iterable[Sequence[object]], *, header: Sequence[str] = (), title: str = "") -> str:
    """Writes an HTML table, with escaped text; each row's first cell names it."""
    parts = [f"<caption>{_escaped(title)}</caption>"] if title else []
    if header:
        parts.append(_row("th", header, "th"))
    parts += [_row("th", row, "td") for row in rows]
    return f"<table>{''.join(parts)}</table>"


def paragraph(text: str) -> str:
    """Writes lines of text in HTML; escapes them."""
    return f"<p>{_escaped(text)}</p>"


def _row(first: str, cells: Sequence[object], others: str) -> str:
    tags = [first] + [others] * (len(cells) - 1)
    return f"<tr>{''.join(f'<{tag}>{_escaped(cell)}</{tag}>' for tag, cell in zip(tags, cells, strict=True))}</tr>"


def _escaped(text: object) -> str:
    return html.escape(str(text)).replace("\n", "<br>")
