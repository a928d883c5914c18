"""Watches over shards: whether their servers are there and still the ones that they were, and which copy of a shard leads."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from jdist.errors import ShardLostError
from jdist.ps.coordinator.closure_queue import ClosureQueue
from jdist.ps.protocol import leadership
from jdist.ps.transport.interface import CallFailed, Channel
from jdist.ps.transport.routed import Copies

_LOG = logging.getLogger(__name__)
CUT_AFTER_S = 3.0  # without an answer from the backup; then the leader is asked whether it reaches it
REFUSALS = 3  # connections refused in a row, after which nothing listens there


class ShardWatch:
    """Asks a shard's copies every second for their identity; `leadership` decides which leads."""

    # While no copy that has the state answers, everybody waits, but nothing is lost. A copy that
    # answers under another incarnation has lost its memory.

    def __init__(self, number: int, copies: Copies, queue: ClosureQueue):
        self._number, self._copies, self._queue, self._times = number, copies, queue, queue.times
        self._lock = threading.RLock()
        self._leadership = leadership.Leadership()
        self._in_step_at: float | None = time.monotonic()  # None once its absence was told
        self._was_in_step = self._has_parted = False
        self._channels: list[Channel] = []
        self._threads = [
            threading.Thread(target=self._watch, args=(copy,), name=f"jdist-watch-{number}-{copy}", daemon=True)
            for copy in range(len(copies.places))
        ]

    def start(self, statuses: Sequence[dict[str, Any] | None]) -> None:
        """Makes the first copy lead, or the second without a first, and starts the watch; `statuses` are the copies'."""
        self._channels = [self._copies.connected(copy) for copy in range(len(statuses))]
        term = 1 + max(status["term"] for status in statuses if status is not None)
        first, second, *_ = (*(None if status is None else status["incarnation"] for status in statuses), None)
        with self._lock:
            self._leadership, commands = leadership.begin(term=term, alive=(first, second))
            self._carry_out(commands)
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> None:
        """Ends its calls, and waits for its threads, once the queue is closed."""
        for channel in self._channels:
            channel.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout_s)

    def _watch(self, copy: int) -> None:
        queue, times, shard, channel = self._queue, self._times, self._number, self._channels[copy]
        answered_at_s, refusals, was_given_up = time.monotonic(), 0, False
        while not queue.closed.is_set():
            try:
                status, _ = channel.call("status", {}, timeout_s=times.ping_s)
            except CallFailed as exc:
                if queue.closed.is_set():
                    return  # `join` has ended the call
                silent_s = time.monotonic() - answered_at_s
                refusals = refusals + 1 if exc.reason == "unavailable" else 0
                if silent_s > times.lost_after_s or refusals >= REFUSALS:
                    self._happened(leadership.Heartbeat(copy=copy, incarnation=None))
                # Else the shard does not wait for this copy, but for the other.
                leads = self._leads(copy)
                if silent_s > times.lost_after_s and leads and shard not in queue.silent:
                    queue.silent[shard] = exc.peer, answered_at_s
                    _LOG.warning(
                        "parameter server %d at %s has not answered for %.0f s: %s. Calls that need it wait; after %g "
                        "s (`ps_timeout_s`) the next call raises ShardLostError",
                        *(shard, exc.peer, silent_s, exc.why, times.ps_timeout_s),
                    )
                # No wait mends another token.
                if (exc.reason == "unauthenticated" or silent_s > times.ps_timeout_s) and not was_given_up:
                    was_given_up = True
                    if leads:
                        queue.shard_lost(shard, self._lost_error(exc, silent_s))
            else:
                if was_given_up:
                    queue.shard_found(shard)
                answered_at_s, refusals, was_given_up = time.monotonic(), 0, False
                queue.heard_of(status["generation"], status["begun_by"])
                self._happened(_heartbeat(copy, status))
                is_waiting = status["leads"] and status["waiting_s"] > min(CUT_AFTER_S, times.lost_after_s)
                if is_waiting and len(self._channels) > 1:  # else it is an earlier job's leader still
                    self._look_at_the_link(copy, status["term"])
                if self._leads(copy) and queue.silent.pop(shard, None):
                    _LOG.warning("parameter server %d is back", shard)
            queue.closed.wait(times.ping_s)

    def _leads(self, copy: int) -> bool:
        with self._lock:
            return copy == self._leadership.leader

    def _lost_error(self, exc: CallFailed, silent_s: float) -> ShardLostError:
        """Makes the error for a server that is given up: the fault, its start and the remedy."""
        refuses = exc.reason == "unauthenticated"
        what = "refuses the token" if refuses else f"has not answered for {silent_s:.0f} s: {exc.why}"
        mend = " with this job's." if refuses else ", or give it more time: `times=jdist.ps.Times(ps_timeout_s=...)`."
        more = f", and shard {self._number} has no other copy" if len(self._channels) > 1 else ""
        return ShardLostError(f"the parameter server {exc.peer} {what}{more}. Start it again{mend}")

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
            "the parameter servers %s and %s both answer, but the first does not reach the second: shard %d goes on "
            "without a backup until it does",
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
            if len(self._channels) > 1:
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
        backup = None if command.backup is None else [*self._copies.places[1 - command.copy], command.backup]
        header = {
            "term": command.term,
            "incarnation": command.incarnation,
            "backup": backup,
            "new_job": command.new_job,
        }
        with contextlib.suppress(CallFailed):  # its watch hears of that
            status, _ = self._channels[command.copy].call("lead", header, timeout_s=self._times.ping_s)
            if status["term"] == command.term:
                self._leadership, commands = leadership.handle(self._leadership, _heartbeat(command.copy, status))
                self._carry_out(commands)


def _heartbeat(copy: int, status: dict[str, Any]) -> leadership.Heartbeat:
    names = ("incarnation", "term", "leads", "backup", "in_sync")
    return leadership.Heartbeat(copy=copy, **{name: status[name] for name in names})
