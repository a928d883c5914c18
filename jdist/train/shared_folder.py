"""A folder that all processes of a job write to: made by one, and seen by the others before anything is trusted to it."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from pathlib import Path

from jdist.cluster.runtime import Runtime
from jdist.cluster.together import together
from jdist.errors import CheckpointError
from jdist.train import checkpoint_disk as disk

_SEEN_S = 10.0  # a network file system may show a new file late
_POLL_S = 0.05


def open_shared(directory: Path, cluster: Runtime, timeout_s: float, name: str) -> list[Path]:
    """Makes the folder and clears away what killed processes left in it; all processes see the same one afterwards.

    Args:
        directory: the folder.
        cluster: the processes.
        timeout_s: how long to wait for the other processes.
        name: names what they exchange, the same on all.

    Returns:
        On process 0, what looks like a killed process's and holds something else.

    Raises:
        CheckpointError: it cannot be made, or is not the one that process 0 writes to.
        ClusterError: so on another process.
    """
    strangers: list[Path] = []
    token = directory / f".shared_{secrets.token_hex(8)}"
    try:
        with together(f"{name}: opening", timeout_s, cluster):
            if cluster.is_chief:
                try:
                    directory.mkdir(parents=True, exist_ok=True)
                    strangers = disk.sweep(directory)
                    if cluster.num_processes > 1:
                        token.touch()
                except OSError as error:
                    raise CheckpointError(f"{directory}: cannot be made: {disk.reason(error)}") from error
        first = cluster.exchange(f"{name}: a file", token.name, timeout_s)[0]
        with together(f"{name}: looking", timeout_s, cluster):
            if not cluster.is_chief:
                _await(directory / first, cluster.process_index)
    finally:
        if cluster.is_chief and cluster.num_processes > 1:
            with contextlib.suppress(OSError):  # it never came to be; or it stays, which does no harm
                token.unlink()
    return strangers


def _await(token: Path, process: int) -> None:
    deadline_s = time.monotonic() + _SEEN_S
    while not token.exists():
        if time.monotonic() > deadline_s:
            raise CheckpointError(
                f"process {process}, on {socket.gethostname()}, does not see in {token.parent} what process 0 has written "
                "there. All processes need one folder on a file system that they share, and the same path to it."
            )
        time.sleep(_POLL_S)
