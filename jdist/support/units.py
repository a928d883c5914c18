"""Numbers with their units, for people."""

from __future__ import annotations


def size(number: int) -> str:
    """Formats bytes in the unit that suits them: `1.50 GiB`."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{number:,} B" if unit == "B" else f"{value:,.2f} {unit}"


def counted(number: int, noun: str) -> str:
    """Counts things: `1 array`, `1,020 arrays`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
