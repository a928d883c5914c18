"""Whether a parameter server is there, and still the one that it was."""

from __future__ import annotations

import threading
import time

from jdist.errors import ShardLostError
from jdist.ps.coordinator.engine import Engine
from jdist.ps.protocol.times import Times
from jdist.ps.transport.interface import CallFailed
from jdist.ps.transport.shard_client import ShardClient


class ShardWatch:
    """Asks a shard every second who it is.

    A shard that does not answer keeps everybody waiting, and nothing is lost by that; one that answers under another
    incarnation has an empty memory.

    Args:
        number: the shard's.
        client: how to reach it.
        engine: what is scheduled.
        times: how often it asks, and how long it waits.
    """

    def __init__(self, number: int, client: ShardClient, engine: Engine, times: Times):
        self.number = number
        self._client, self._engine, self._times = client, engine, times
        self._incarnation: str | None = None
        self._thread = threading.Thread(target=self._watch, name=f"jdist-watch-{number}", daemon=True)

    def start(self) -> None:
        """Notes who the shard is, before it is given its state, as who comes in its place later is another; and watches it.

        Raises:
            ShardLostError: it does not answer.
        """
        self._incarnation = self._client.status()["incarnation"]
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits for its end, once the engine is closed."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _watch(self) -> None:
        engine, times, last = self._engine, self._times, time.monotonic()
        told = False
        while True:
            if engine.closed.wait(times.ping_s):
                return
            try:
                status = self._client.status(times.ping_s)
            except CallFailed as exc:
                silent_s = time.monotonic() - last
                if (refuses(exc) or silent_s > times.ps_timeout_s) and not told:
                    told = True
                    engine.shard_lost(self.number, lost_error(self._client.channel.peer, exc, silent_s))
                continue
            if told:
                engine.shard_found(self.number)
            last, told = time.monotonic(), False
            engine.heard_of(status["generation"], status["begun_by"])
            if status["incarnation"] != self._incarnation:
                self._incarnation = status["incarnation"]
                engine.memory_lost(self.number)


def refuses(exc: CallFailed) -> bool:
    """Whether the server came back with another token: no wait mends that."""
    return exc.reason == "unauthenticated"


def lost_error(peer: str, exc: CallFailed, silent_s: float, more: str = "") -> ShardLostError:
    """What the user is told of a server that is given up.

    Args:
        peer: the server.
        exc: why the last question failed.
        silent_s: since when it has not answered.
        more: what else is to be said of it.
    """
    what = "refuses the token" if refuses(exc) else f"has not answered for {silent_s:.0f} s: {exc.why}"
    mend = " with this job's." if refuses(exc) else ", or give it more time: `times=jdist.ps.Times(ps_timeout_s=...)`."
    return ShardLostError(f"the parameter server {peer} {what}{more}. Start it again{mend}")
