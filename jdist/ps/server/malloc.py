"""Settings of the C library's malloc, for a process whose arrays have the same sizes in every step."""

from __future__ import annotations

import ctypes
import logging

import jax
import numpy as np

_LOG = logging.getLogger(__name__)
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # of glibc's malloc.h
_KEPT = (1 << 31) - 1  # bytes; the largest that it takes
_PAD = 32 << 20
LARGE_BYTES = 1 << 20  # below which `release_arguments` takes longer than it is worth


def keep_freed_memory() -> bool:
    """Makes freed memory stay with this process for the next step; returns whether glibc could."""
    # By default glibc returns large blocks at once, and each step gets them page by page again.
    # That costs more than to compute gradients in them.
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError) as exc:
        _LOG.debug("the C library has no mallopt: %s", exc)
        return False
    settings = {_MMAP_MAX: 0, _TRIM_THRESHOLD: _KEPT, _TOP_PAD: _PAD, _ARENA_MAX: 1}
    return all([mallopt(name, value) for name, value in settings.items()])


_nothing = jax.jit(lambda x: x)


def release_arguments() -> None:
    """Makes JAX release the numpy arguments of ended programs before its next call."""
    # Called before a server takes memory for the next gradients; otherwise it would hold two of
    # them.
    _nothing(np.int8(0))
