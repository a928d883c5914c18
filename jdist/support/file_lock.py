"""Locks on files, which the system releases however their process ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

_GLANCE_S = 1.0  # longer than `is_held` holds a file
_POLL_S = 0.02


@contextlib.contextmanager
def hold(path: Path, *, timeout_s: float = _GLANCE_S) -> Iterator[None]:
    """Locks a file for this process while the block runs; creates it if necessary."""
    import fcntl  # of POSIX alone; the rest of jdist can be imported anywhere

    deadline_s = time.monotonic() + timeout_s
    with path.open("a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(_POLL_S)
        yield


def is_held(path: Path) -> bool:
    """Returns whether a process holds the file, in a shared folder also one of another machine."""
    import fcntl

    try:
        handle = path.open("r")
    except FileNotFoundError:
        return False
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
