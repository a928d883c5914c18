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
    near = difflib.get_close_matches(str(name).lower(), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
