"""The known name nearest to one that is not known, as the end of an error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A sentence with the name that was probably meant, with a leading space; nothing if none is near.

    Example:
        >>> did_you_mean("MEAN", ["mean", "sum"])
        " Did you mean 'mean'?"
    """
    matches = difflib.get_close_matches(str(name).lower(), list(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


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
