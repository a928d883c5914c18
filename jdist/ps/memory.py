"""The C library's memory, set for a process whose arrays are as large at every step as at the last."""

from __future__ import annotations

import ctypes
import logging

_LOG = logging.getLogger(__name__)
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # of glibc's malloc.h
_KEPT = (1 << 31) - 1  # bytes; the largest that it takes
_PAD = 32 << 20


def keep_freed_memory() -> bool:
    """From now on freed memory stays with this process, to be used again at the next step.

    By default glibc gives large blocks back at once, and each step gets them anew, page by page: that costs more than to
    compute gradients in them.

    Returns:
        Whether the C library has these settings; it is glibc's affair alone.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError) as exc:
        _LOG.debug("the C library has no mallopt: %s", exc)
        return False
    settings = {_MMAP_MAX: 0, _TRIM_THRESHOLD: _KEPT, _TOP_PAD: _PAD, _ARENA_MAX: 1}
    return all([mallopt(name, value) for name, value in settings.items()])
