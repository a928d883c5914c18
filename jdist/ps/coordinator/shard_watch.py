"""Watches over shards: whether their servers are there and still the ones that they were, and which copy of a shard leads."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jdist.errors import ShardLostError
from jdist.ps.coordinator.closure_queue import ClosureQueue
from jdist.ps.protocol import leadership
from jdist.ps.transport.interface import CallFailed, Channel
from jdist.ps.transport.routed import Copies
from jdist.ps.transport.shard_client import ShardClient

_LOG = logging.getLogger(__name__)
CUT_AFTER_S = 3.0  # without an answer from the backup; then the leader is asked whether it reaches it
REFUSALS = 3  # connections refused in a row, after which nothing listens there
Status = dict[str, Any]


class ShardWatch:
    """Asks a shard every second for its identity."""

    # While a shard does not answer, everybody waits, but nothing is lost. A shard that answers
    # under another incarnation has lost its memory.

    def __init__(self, number: int, client: ShardClient, queue: ClosureQueue):
        self._number, self._client, self._queue = number, client, queue
        self._incarnation: str | None = None
        self._thread = threading.Thread(target=self._watch, name=f"jdist-watch-{number}", daemon=True)

    def start(self) -> None:
        """Notes the shard's incarnation, before it gets its state, and starts the watch."""
        # A process that takes its place later has another incarnation.
        self._incarnation = self._client.status()["incarnation"]
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits for its end, once the queue is closed."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _watch(self) -> None:
        def give_up(exc: CallFailed, silent_s: float) -> None:
            self._queue.shard_lost(self._number, _lost_error(exc, silent_s))

        def on_status(status: Status) -> None:
            if status["incarnation"] != self._incarnation:
                self._incarnation = status["incarnation"]
                self._queue.memory_lost(self._number)

        _ask_again_and_again(self._client.status, self._number, self._queue, on_status=on_status, give_up=give_up)


class CopiesWatch:
    """Asks both copies of a shard every second for their identity; `leadership` decides."""

    def __init__(self, number: int, copies: Copies, queue: ClosureQueue):
        self._number, self._copies, self._queue, self._times = number, copies, queue, queue.times
        self._lock = threading.RLock()
        self._leadership = leadership.Leadership()
        self._in_step_at: float | None = time.monotonic()  # None once its absence was told
        self._was_in_step = self._has_parted = False
        self._channels: list[Channel] = []
        self._threads = [
            threading.Thread(target=self._watch, args=(copy,), name=f"jdist-watch-{number}-{copy}", daemon=True)
            for copy in (0, 1)
        ]

    def start(self) -> None:
        """Makes the first copy lead, or the second without a first, and starts the watch."""
        times = self._times
        first, second = self._copies.statuses(times.lost_after_s, give_up_s=times.ps_timeout_s)
        self._channels = [self._copies.connected(copy) for copy in (0, 1)]
        term = 1 + max(status["term"] for status in (first, second) if status is not None)
        with self._lock:
            one, other = (None if status is None else status["incarnation"] for status in (first, second))
            self._leadership, commands = leadership.begin(term=term, alive=(one, other))
            self._carry_out(commands)
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits for its end, once the queue is closed."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout_s)
        for channel in self._channels:
            channel.close()

    def _watch(self, copy: int) -> None:
        times, channel, refusals = self._times, self._channels[copy], 0

        def on_failure(exc: CallFailed, silent_s: float) -> None:
            nonlocal refusals
            refusals = refusals + 1 if exc.reason == "unavailable" else 0
            if silent_s > times.lost_after_s or refusals >= REFUSALS:
                self._happened(leadership.HeartbeatLost(copy=copy))

        def is_leader() -> bool:
            with self._lock:
                return copy == self._leadership.leader

        def give_up(exc: CallFailed, silent_s: float) -> None:
            """Gives the shard up where this copy has the only state there is; else the other copy does."""
            if is_leader():
                more = f", and shard {self._number} has no other copy"
                self._queue.shard_lost(self._number, _lost_error(exc, silent_s, more))

        def on_status(status: Status) -> None:
            nonlocal refusals
            refusals = 0
            self._happened(_heartbeat(copy, status))
            if status["leads"] and status["waiting_s"] > min(CUT_AFTER_S, times.lost_after_s):
                self._look_at_the_link(copy, status["term"])

        _ask_again_and_again(
            lambda timeout_s: channel.call("status", {}, timeout_s=timeout_s)[0],
            self._number,
            self._queue,
            on_status=on_status,
            on_failure=on_failure,
            give_up=give_up,
            leads=is_leader,
        )

    def _look_at_the_link(self, copy: int, term: int) -> None:
        """Does without the backup if its leader does not reach it, although it answers here."""
        leader, other, timeout_s = self._channels[copy], self._channels[1 - copy], self._times.lost_after_s
        try:
            if leader.call("reaches backup", {}, timeout_s=timeout_s)[0]["reached"]:
                return
            other.call("status", {}, timeout_s=self._times.ping_s)
        except CallFailed:
            return  # one of them is not there, which its watch tells
        _LOG.warning(
            "the parameter servers %s and %s both answer, and the one does not reach the other: shard %d goes on without a "
            "backup until they do",
            leader.peer,
            other.peer,
            self._number,
        )
        self._happened(leadership.LinkCut(term=term))

    def _happened(self, event: leadership.Event) -> None:
        with self._lock:
            if self._queue.closed.is_set():
                return
            self._leadership, commands = leadership.handle(self._leadership, event)
            self._carry_out(commands)
            self._warn_if_alone()

    def _warn_if_alone(self) -> None:
        """Says once that a shard has had no backup for long: its servers may not reach one another."""
        now = time.monotonic()
        if None not in self._leadership.holds:
            if self._has_parted:
                _LOG.warning("shard %d has two copies in step again", self._number)
            self._in_step_at, self._was_in_step, self._has_parted = now, True, False
            return
        self._has_parted = self._was_in_step
        if self._in_step_at is not None and now - self._in_step_at > self._times.ps_timeout_s:
            self._in_step_at = None
            first, second = (address for address, _ in self._copies.places)
            _LOG.warning(
                "shard %d has had no backup for %.0f s: is one of %s and %s gone, or does one not reach the other?",
                self._number,
                self._times.ps_timeout_s,
                first,
                second,
            )

    def _carry_out(self, commands: Sequence[leadership.Command]) -> None:
        for command in commands:
            match command:
                case leadership.StateLost():
                    self._queue.memory_lost(self._number)
                case leadership.Lead():
                    self._lead(command)
                case leadership.Announce():
                    route = self._copies.route(command.copy, command.term)
                    if self._copies.channel.move(route):
                        _LOG.warning("the parameter server %s leads shard %d now", route.address, self._number)

    def _lead(self, command: leadership.Lead) -> None:
        """Has a copy lead. If it does not answer, it will be asked again when it does."""
        address, slot = self._copies.places[1 - command.copy]
        backup = None if command.backup is None else [address, slot, command.backup]
        header = {"term": command.term, "incarnation": command.incarnation, "backup": backup, "anew": command.anew}
        with contextlib.suppress(CallFailed):  # its watch hears of that
            status, _ = self._channels[command.copy].call("lead", header, timeout_s=self._times.ping_s)
            if status["term"] == command.term:
                self._leadership, commands = leadership.handle(self._leadership, _heartbeat(command.copy, status))
                self._carry_out(commands)


def _ask_again_and_again(
    ask: Callable[[float], Status],
    shard: int,
    queue: ClosureQueue,
    *,
    on_status: Callable[[Status], None],
    give_up: Callable[[CallFailed, float], None],
    on_failure: Callable[[CallFailed, float], None] = lambda exc, silent_s: None,
    leads: Callable[[], bool] = lambda: True,
) -> None:
    """Asks a server for its identity until the queue is closed."""
    # `give_up` is called once the server has been silent for long or refuses the token. `leads`:
    # whether the shard waits for this server rather than for its other copy.
    times, answered_at_s, was_given_up = queue.times, time.monotonic(), False
    while not queue.closed.is_set():
        try:
            status = ask(times.ping_s)
        except CallFailed as exc:
            silent_s = time.monotonic() - answered_at_s
            on_failure(exc, silent_s)
            if silent_s > times.lost_after_s and leads() and shard not in queue.silent:
                queue.silent[shard] = exc.peer, answered_at_s
                _LOG.warning(
                    "parameter server %d at %s has not answered for %.0f s: %s. Whatever needs it waits; after %g s "
                    "(`ps_timeout_s`) the next call raises ShardLostError",
                    *(shard, exc.peer, silent_s, exc.why, times.ps_timeout_s),
                )
            if (_refuses(exc) or silent_s > times.ps_timeout_s) and not was_given_up:
                was_given_up = True
                give_up(exc, silent_s)
        else:
            if was_given_up:
                queue.shard_found(shard)
            answered_at_s, was_given_up = time.monotonic(), False
            queue.heard_of(status["generation"], status["begun_by"])
            on_status(status)
            if leads() and queue.silent.pop(shard, None):
                _LOG.warning("parameter server %d is there again", shard)
        queue.closed.wait(times.ping_s)


def _refuses(exc: CallFailed) -> bool:
    """Whether the server came back with another token: no wait mends that."""
    return exc.reason == "unauthenticated"


def _lost_error(exc: CallFailed, silent_s: float, more: str = "") -> ShardLostError:
    """Makes the error for a server that is given up: the fault, its start and the remedy."""
    what = "refuses the token" if _refuses(exc) else f"has not answered for {silent_s:.0f} s: {exc.why}"
    mend = " with this job's." if _refuses(exc) else ", or give it more time: `times=jdist.ps.Times(ps_timeout_s=...)`."
    return ShardLostError(f"the parameter server {exc.peer} {what}{more}. Start it again{mend}")


def _heartbeat(copy: int, status: Status) -> leadership.Heartbeat:
    names = ("incarnation", "term", "leads", "in_sync")
    return leadership.Heartbeat(copy=copy, **{name: status[name] for name in names})
