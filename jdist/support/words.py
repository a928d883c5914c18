"""Words of messages: the known name nearest to an unknown one, and numbers with their units."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Writes a sentence with the nearest known name, after a space; "" if none is near."""
    matches = difflib.get_close_matches(str(name).lower(), list(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def closest(name: str, valid: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Finds the valid name nearest to `name`; None if none is near. With `cutoff` 1 only the same name is."""
    return next(iter(difflib.get_close_matches(name, sorted(set(valid)), n=1, cutoff=cutoff)), None)


def nearest(name: str, valid: Iterable[str], *, label: str = "Valid", limit: int = 12) -> str:
    """Writes a sentence with the nearest valid name, or all, after a space; "" without any."""
    # At most `limit` names, called `label`, are listed.
    names = sorted(set(valid))
    close = closest(name, names)
    if close is not None:
        return f" Did you mean {close}?"
    if not names:
        return ""
    return f" {label}: {', '.join(names[:limit])}{', ...' if len(names) > limit else '.'}"


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
