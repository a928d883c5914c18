"""The nearest valid name, for messages about names that are not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: str, valid: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The valid name nearest to `name`, or None if none is near; with `cutoff` 1 only the same name is."""
    return next(iter(difflib.get_close_matches(name, sorted(set(valid)), n=1, cutoff=cutoff)), None)


def nearest(name: str, valid: Iterable[str], *, label: str = "Valid", limit: int = 12) -> str:
    """A sentence that names the valid name nearest to `name`, or the valid names if none is near.

    Args:
        name: what was written.
        valid: what could have been written.
        label: what to call the valid names when all are listed.
        limit: how many of them to list at most.

    Returns:
        ` Did you mean steps?`, ` Valid: epochs, steps.`, with a leading space, or nothing if none is valid.

    Example:
        >>> nearest("step", ["epochs", "steps"])
        ' Did you mean steps?'
    """
    names = sorted(set(valid))
    close = closest(name, names)
    if close is not None:
        return f" Did you mean {close}?"
    if not names:
        return ""
    return f" {label}: {', '.join(names[:limit])}{', ...' if len(names) > limit else '.'}"
