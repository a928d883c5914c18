"""The exit codes by which a process of a job tells the launcher, or a cluster's scheduler, how it ended."""

from __future__ import annotations

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
    """
    if isinstance(error, PeerFailedError) and error.exit_code == USAGE:
        return USAGE  # then starting again helps nowhere
    if isinstance(error, _LOST):
        return PEER_LOST
    if isinstance(error, JDistError) and not isinstance(
        error, NonFiniteError | ReplicaDivergenceError | CheckpointError | ClosureError
    ):
        return USAGE
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
