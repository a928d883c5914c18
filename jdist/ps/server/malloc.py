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
    """Has freed memory stay with this process, to be used again at the next step.

    By default glibc gives large blocks back at once, and each step gets them anew, page by page: that costs more than to
    compute gradients in them.

    Returns:
        Whether the C library has these settings; only glibc does.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError) as exc:
        _LOG.debug("the C library has no mallopt: %s", exc)
        return False
    settings = {_MMAP_MAX: 0, _TRIM_THRESHOLD: _KEPT, _TOP_PAD: _PAD, _ARENA_MAX: 1}
    return all([mallopt(name, value) for name, value in settings.items()])


_nothing = jax.jit(lambda x: x)


def release_arguments() -> None:
    """Has JAX release the numpy arguments of programs that have ended, which it does at the next call of any program.

    A server calls it before it takes memory for the next gradients, or it would hold two of them.
    """
    _nothing(np.int8(0))
