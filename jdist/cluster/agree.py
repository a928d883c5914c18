"""What all processes of a job do at the same time: an error that one of them meets is raised on all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jdist.cluster import exit_status
from jdist.cluster.runtime import Runtime, started
from jdist.errors import PeerFailedError

_MOST_LETTERS = 2000


@contextlib.contextmanager
def together(what: str, timeout_s: float, cluster: Runtime | None = None) -> Iterator[None]:
    """All processes come to the end of the block, or to an error that one of them met in it.

    In the block no process may wait for another.

    Args:
        what: names the block in errors; the same on all.
        timeout_s: how long to wait for the others at its end.
        cluster: the processes; None: those that this one has joined by the end of the block, if it has.

    Raises:
        Exception: what was raised here.
        PeerFailedError: what was raised on another process, if nothing was here.
        ClusterTimeoutError: not all came in time.
    """
    error = None
    try:
        yield
    except Exception as exc:  # noqa: BLE001 - not swallowed: raised below
        error = exc
    cluster = cluster or started()
    if cluster is not None:
        own = None if error is None else [f"{error}"[:_MOST_LETTERS], exit_status.of(error)]
        said = cluster.exchange(what, own, timeout_s)
        wrong = [(process, *one) for process, one in enumerate(said) if one is not None]
        if error is None and wrong:
            process, text, code = wrong[0]
            raise PeerFailedError(f"process {process}: {text}", exit_code=code)
    if error is not None:
        raise error
