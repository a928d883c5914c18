"""Free ports of this machine, for the processes of one attempt."""

from __future__ import annotations

import contextlib
import random
import socket

# Below the range from which systems take ports for outgoing connections: between choosing a port here and its use
# by a process that has first to start, no connection can take it.
_RANGE = range(20_000, 32_000, 2)
_TRIES = 2_000


def free_ports(number: int) -> list[int]:
    """Distinct ports P such that P and P + 1 are free on all interfaces.

    Process 0 has JAX's coordinator at its port and jdist's watch channel at the next.

    Args:
        number: how many.

    Raises:
        OSError: so many were not found.
    """
    found: list[int] = []
    candidates = random.SystemRandom().sample(_RANGE, min(_TRIES, len(_RANGE)))
    for port in candidates:
        if len(found) == number:
            return found
        if _is_free(port) and _is_free(port + 1):
            found.append(port)
    if len(found) == number:
        return found
    raise OSError(f"only {len(found)} of {number} free pairs of ports found from {_RANGE.start} to {_RANGE.stop}")


def _is_free(port: int) -> bool:
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
