"""Columns of text."""

from __future__ import annotations

from collections.abc import Sequence

from jdist.report.progress import readable


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> str:
    """Formats a plain text table; the columns in `right` hold numbers, set to the right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    to_right = [name in right for name in header]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if r else cell.ljust(width) for cell, width, r in zip(line, widths, to_right, strict=True)
        ).rstrip()
        for line in lines
    )


def figure(value: float | None) -> str:
    """Formats a metric for a cell; `-` if there is none."""
    return "-" if value is None else readable(value)
