"""Whether a shard's two copies are there, which of them leads, and who has to be told."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jdist.errors import ShardLostError
from jdist.ps.coordinator.engine import Engine
from jdist.ps.coordinator.shard_watch import lost_error, refuses
from jdist.ps.protocol import leadership as machine
from jdist.ps.protocol.leadership import (
    Announce,
    Command,
    Event,
    Heartbeat,
    HeartbeatLost,
    Lead,
    Leadership,
    LinkCut,
    StateLost,
)
from jdist.ps.protocol.times import Times
from jdist.ps.transport.interface import CallFailed, Channel
from jdist.ps.transport.routed import Route, RoutedChannel, SlotChannel

_LOG = logging.getLogger(__name__)
CUT_AFTER_S = 3.0  # that what was sent has had no answer: then it is asked whether there is a way at all
REFUSALS = 3  # connections refused, one after the other, after which nothing listens there: no need to wait longer


class Copies:
    """Where the two copies of a shard are.

    Attributes:
        channel: to whichever leads.
        places: `(address, slot)` of each.
    """

    def __init__(self, connect: Callable[[str], Channel], places: Sequence[tuple[str, int]]):
        """Connects at the first call.

        Args:
            connect: from a server's address to a channel.
            places: `(address, slot)` of each copy; the first leads at the beginning.
        """
        self._connect, self.places = connect, tuple(places)
        self.channel = RoutedChannel(connect, self.route(0, 0))

    def route(self, copy: int, term: int) -> Route:
        """The way to a copy."""
        address, slot = self.places[copy]
        return Route(address=address, slot=slot, term=term)

    def connected(self, copy: int) -> Channel:
        """A channel to a copy, whether it leads or not."""
        address, slot = self.places[copy]
        return SlotChannel(self._connect(address), slot)

    def statuses(self, timeout_s: float) -> list[dict[str, Any] | None]:
        """What both say of themselves; None of one that does not answer.

        Raises:
            ShardLostError: neither does.
        """
        channels = [self.connected(copy) for copy in (0, 1)]
        try:
            with ThreadPoolExecutor(2) as pool:
                found = list(pool.map(functools.partial(_status, timeout_s=timeout_s), channels))
        finally:
            for channel in channels:
                channel.close()
        if found == [None, None]:
            first, second = (address for address, _ in self.places)
            raise ShardLostError(f"neither {first} nor {second} answers, which have the two copies of a shard")
        return found


def two_copies(connect: Callable[[str], Channel], addresses: Sequence[str], ps: Sequence[str]) -> list[Copies]:
    """Each shard on its own server, and its backup on the next.

    Args:
        connect: from a server's address to a channel.
        addresses: of each shard, its own server.
        ps: all servers.
    """
    after = dict(zip(ps, [*ps[1:], ps[0]], strict=True))
    return [Copies(connect, [(address, 0), (after[address], 1)]) for address in addresses]


class ReplicaWatch:
    """Asks both copies of a shard every second who they are, and does what `leadership` makes of it.

    Args:
        number: the shard's.
        copies: where they are.
        engine: what is scheduled.
        times: how often it asks, and how long it waits.
    """

    def __init__(self, number: int, copies: Copies, engine: Engine, times: Times):
        self.number = number
        self._copies, self._engine, self._times = copies, engine, times
        self._lock = threading.Condition()
        self._replicas = Leadership()
        self._in_step_at: float | None = time.monotonic()  # None once its absence was told
        self._was_in_step = self._has_parted = False
        self._channels: list[Channel] = []
        self._threads = [
            threading.Thread(target=self._watch, args=(copy,), name=f"jdist-watch-{number}-{copy}", daemon=True)
            for copy in (0, 1)
        ]

    def start(self) -> None:
        """Has the first copy lead, or the second where there is no first one, and starts the watch.

        Raises:
            ShardLostError: neither answers.
        """
        found = self._copies.statuses(self._times.lost_after_s)
        self._channels = [self._copies.connected(copy) for copy in (0, 1)]
        term = 1 + max(status["term"] for status in found if status is not None)
        with self._lock:
            first, second = (None if status is None else status["incarnation"] for status in found)
            self._replicas, commands = machine.begin(term=term, alive=(first, second))
            self._carry_out(commands)
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits for its end, once the engine is closed."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout_s)
        for channel in self._channels:
            channel.close()

    def wait_for(self, is_so: Callable[[Leadership], bool], timeout_s: float) -> bool:
        """Waits until something is so of the copies; whether it was in time."""
        with self._lock:
            return self._lock.wait_for(lambda: is_so(self._replicas), timeout_s)

    def _watch(self, copy: int) -> None:
        engine, times, channel = self._engine, self._times, self._channels[copy]
        last, refusals, told = time.monotonic(), 0, False
        while not engine.closed.is_set():
            try:
                header, _ = channel.call("status", {}, timeout_s=times.ping_s)
            except CallFailed as exc:
                silent_s = time.monotonic() - last
                refusals = refusals + 1 if exc.reason == "unavailable" else 0
                if silent_s > times.lost_after_s or refusals >= REFUSALS:
                    self._happened(HeartbeatLost(copy=copy))
                if (refuses(exc) or silent_s > times.ps_timeout_s) and not told:
                    told = True
                    self._tell(copy, exc, silent_s)
            else:
                if told:
                    self._engine.shard_found(self.number)
                last, refusals, told = time.monotonic(), 0, False
                engine.heard_of(header["generation"], header["begun_by"])
                self._happened(_heartbeat(copy, header))
                if header["leads"] and header["waiting_s"] > min(CUT_AFTER_S, times.lost_after_s):
                    self._look_at_the_link(copy, header["term"])
            engine.closed.wait(times.ping_s)

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
            self.number,
        )
        self._happened(LinkCut(term=term))

    def _tell(self, copy: int, exc: CallFailed, silent_s: float) -> None:
        """A server is not there: an error where it has the only state there is; the other can be done without."""
        with self._lock:
            replicas = self._replicas
        if copy != replicas.leader:
            return
        more = f", and shard {self.number} has no other copy"
        self._engine.shard_lost(self.number, lost_error(exc.peer, exc, silent_s, more))

    def _happened(self, event: Event) -> None:
        with self._lock:
            if self._engine.closed.is_set():
                return
            self._replicas, commands = machine.handle(self._replicas, event)
            self._carry_out(commands)
            self._warn_if_alone()
            self._lock.notify_all()

    def _warn_if_alone(self) -> None:
        """Says once that a shard has had no backup for long: its servers may not reach one another."""
        now = time.monotonic()
        if None not in self._replicas.holds:
            if self._has_parted:
                _LOG.warning("shard %d has two copies in step again", self.number)
            self._in_step_at, self._was_in_step, self._has_parted = now, True, False
            return
        self._has_parted = self._was_in_step
        if self._in_step_at is not None and now - self._in_step_at > self._times.ps_timeout_s:
            self._in_step_at = None
            first, second = (address for address, _ in self._copies.places)
            _LOG.warning(
                "shard %d has had no backup for %.0f s: is one of %s and %s gone, or does one not reach the other?",
                self.number,
                self._times.ps_timeout_s,
                first,
                second,
            )

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case StateLost():
                    self._engine.memory_lost(self.number)
                case Lead():
                    self._lead(command)
                case Announce():
                    route = self._copies.route(command.copy, command.term)
                    if self._copies.channel.move(route):
                        _LOG.warning("the parameter server %s leads shard %d now", route.address, self.number)

    def _lead(self, command: Lead) -> None:
        """Has a copy lead. If it does not answer, it will be asked again when it does."""
        address, slot = self._copies.places[1 - command.copy]
        backup = None if command.backup is None else [address, slot, command.backup]
        said = {"term": command.term, "incarnation": command.incarnation, "backup": backup, "anew": command.anew}
        with contextlib.suppress(CallFailed):  # its watch hears of that
            header, _ = self._channels[command.copy].call("lead", said, timeout_s=self._times.ping_s)
            if header["term"] == command.term:
                self._replicas, commands = machine.handle(self._replicas, _heartbeat(command.copy, header))
                self._carry_out(commands)


def _status(channel: Channel, timeout_s: float) -> dict[str, Any] | None:
    try:
        return channel.call("status", {}, timeout_s=timeout_s)[0]
    except CallFailed as exc:
        _LOG.warning("%s does not answer: %s", channel.peer, exc.reason)
        return None


def _heartbeat(copy: int, header: dict[str, Any]) -> Heartbeat:
    names = ("incarnation", "term", "leads", "in_sync")
    return Heartbeat(copy=copy, **{name: header[name] for name in names})
