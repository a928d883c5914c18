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


def failed(code: int) -> None:
    """Notes that the program ends with an error that it has reported itself: here, and in its cluster if it is in one.

    Args:
        code: its exit code.
    """
    unfinished(f"exit code {code}")
    runtime = sys.modules.get("jdist.cluster.runtime")  # importing it here would start JAX only to end
    if runtime is not None and (cluster := runtime.started()) is not None:
        cluster.failed(code)


def is_finished() -> bool:
    """Whether nothing speaks against it: no note, and no exception that has reached the interpreter."""
    return not _notes and getattr(sys, "last_value", None) is None
