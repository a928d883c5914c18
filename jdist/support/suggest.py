"""Suggests the known name nearest to an unknown one, at the end of an error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Writes a sentence with the name that was probably meant, with a leading space; empty if none is close.

    Example:
        >>> did_you_mean("MEAN", ["mean", "sum"])
        " Did you mean 'mean'?"
    """
    matches = difflib.get_close_matches(str(name).lower(), list(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""
