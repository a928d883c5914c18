"""How this program ends, for those who want to know at its exit: done, or to be started again.

Python tells its `atexit` functions nothing about that. So whoever knows of a bad end notes it here.
"""

from __future__ import annotations

import sys

_notes: list[str] = []


def unfinished(why: str) -> None:
    """Notes that the program ends before its work is done.

    Args:
        why: as a clause, for logs.
    """
    _notes.append(why)


def is_finished() -> bool:
    """Whether nothing speaks against it: no note, and no exception that has reached the interpreter."""
    return not _notes and getattr(sys, "last_value", None) is None
