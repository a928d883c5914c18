"""The exit codes by which a process of a job tells the launcher, or a cluster's scheduler, how it ended."""

from __future__ import annotations

import errno
import logging
import os
import sys

from jdist.errors import (
    CheckpointError,
    ClosureError,
    ClusterTimeoutError,
    JDistError,
    NonFiniteError,
    NoWorkersError,
    PeerFailedError,
    PeerLostError,
    PortInUseError,
    ReplicaDivergenceError,
    ShardLostError,
)

FINISHED = 0
FAILED = 1  # training failed: a NaN, replicas that differ, an exception
CANNOT_WRITE = 74  # EX_IOERR of sysexits.h: the disk is full, or may not be written; trying again leads to the same
USAGE = 2  # what was asked for is not right; trying again leads to the same
PEER_LOST = 75  # EX_TEMPFAIL of sysexits.h: another process was lost, failed or did not come; nothing was saved since
INTERRUPTED = 130  # 128 + SIGINT: saved and left
PREEMPTED = 143  # 128 + SIGTERM: saved and left
_LOST = (PeerFailedError, PeerLostError, ClusterTimeoutError, PortInUseError, NoWorkersError, ShardLostError)


def of(error: BaseException) -> int:
    """The code of a program that an error ends.

    Example:
        >>> of(PeerFailedError("process 1: no such key", exit_code=USAGE)), of(OSError("disk gone"))
        (2, 1)
        >>> of(OSError(errno.ENOSPC, "No space left on device"))
        74
    """
    if isinstance(error, PeerFailedError) and error.exit_code in (USAGE, CANNOT_WRITE):
        return error.exit_code  # then starting again helps nowhere
    if _cannot_write(error):
        return CANNOT_WRITE
    if isinstance(error, _LOST):
        return PEER_LOST
    if isinstance(error, JDistError) and not isinstance(
        error, NonFiniteError | ReplicaDivergenceError | CheckpointError | ClosureError
    ):
        return USAGE
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED


def _cannot_write(error: BaseException | None) -> bool:
    """Whether an error, or what led to it, says that a disk takes nothing more."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            return True
        error = error.__cause__ or error.__context__
    return False


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


def is_interactive() -> bool:
    """Whether errors before the end say nothing of the end: in a notebook or a Python shell."""
    return bool(sys.flags.interactive) or getattr(sys, "ps1", None) is not None


def end_with(code: int, error: BaseException | None) -> None:
    """At the end of a program: if that error has ended it, ends it with a code that Python would not give.

    Args:
        code: the code.
        error: which; None: nothing is done.
    """
    if error is not None and getattr(sys, "last_value", None) is error and not is_interactive():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def is_finished() -> bool:
    """Whether nothing speaks against it: no note, and no exception that has reached the interpreter."""
    return not _notes and getattr(sys, "last_value", None) is None
