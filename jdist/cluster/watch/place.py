"""A process's place in the watch, and its way to process 0."""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import dataclass

from jdist.cluster.address import join
from jdist.errors import ClusterTimeoutError

_TRY_S = 2.0
_RETRY_S = 0.2
_QUIET_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Who this process is, and where process 0 waits for it.

    Attributes:
        process: its index.
        addresses: of all processes, by index, "host:port"; None: process 0 sees where it comes from.
        host: process 0's host.
        port: the port that process 0 watches on.
        token: shared by all processes of the job; "" for none.
    """

    process: int
    addresses: tuple[str | None, ...]
    host: str
    port: int
    token: str

    def label(self, process: int) -> str:
        """A process for people: its number, and its address if that is known."""
        address = self.addresses[process] if 0 <= process < len(self.addresses) else None
        return f"process {process}" + (f" ({address})" if address else "")


def connect(place: Place, timeout_s: float) -> socket.socket:
    """A connection to process 0, which may not listen yet.

    Raises:
        ClusterTimeoutError: it was not reached in time.
    """
    deadline_s, last = time.monotonic() + timeout_s, "no answer"
    speak_at_s = time.monotonic() + _QUIET_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            return socket.create_connection((place.host, place.port), min(_TRY_S, left_s))
        except OSError as exc:
            last = str(exc)
            if time.monotonic() > speak_at_s:
                speak_at_s = deadline_s
                to = join(place.host, place.port)
                text = f"process {place.process} waits for process 0 at {to}, up to {timeout_s:g} s ({last})"
                print(f"jdist: {text}", file=sys.stderr, flush=True)
            time.sleep(min(_RETRY_S, left_s))
    raise ClusterTimeoutError(
        f"process {place.process} did not reach process 0 at {join(place.host, place.port)} within {timeout_s:g} s ({last}). "
        "Is it running, is the address right, and is the port open between the machines?"
    )
