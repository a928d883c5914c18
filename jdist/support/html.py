"""Tables and text in HTML, for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def table(rows: Iterable[Sequence[object]], *, header: Sequence[str] = (), title: str = "") -> str:
    """Writes a table in HTML; escapes all text.

    Args:
        rows: rows of cells, the first of which names the row.
        header: names of the columns.
        title: the caption; its line breaks stay.

    Example:
        >>> table([("rows", 3)], title="a < b")
        '<table><caption>a &lt; b</caption><tr><th>rows</th><td>3</td></tr></table>'
    """
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
