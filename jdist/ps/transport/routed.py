"""Channels that follow a shard's leader: a shard has one or two copies; when another leads, calls go there."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from jdist.errors import ShardLostError, WireError
from jdist.ps.protocol.wire import from_plain
from jdist.ps.transport import interface
from jdist.ps.transport.interface import Answer, Arrays, CallFailed, CallOptions, Channel, Header

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
    """The place of a shard's leader."""

    address: str  # its server's
    slot: int  # which of the server's copies it is
    term: int  # the term in which it began to lead


class SlotChannel(Channel):
    """A channel to one copy on a server."""

    def __init__(self, channel: Channel, slot: int):
        self._channel, self._slot, self.peer = channel, slot, channel.peer

    def begin(
        self, method: str, header: Header, arrays: Arrays = (), **options: Unpack[CallOptions]
    ) -> Callable[[], Answer]:
        return self._channel.begin(method, {**header, "slot": self._slot}, arrays, **options)

    def close(self) -> None:
        self._channel.close()


class RoutedChannel(Channel):
    """A channel to the current leader."""

    # A call to a copy that does not lead fails with the reason "moved"; so does a call that is
    # running when the leader changes. A caller that repeats it finds the new leader.

    def __init__(self, connect: Callable[[str], Channel], route: Route):
        self._connect, self._lock, self._closed = connect, threading.Lock(), False
        self.route, self.peer = route, route.address
        self._channel: Channel = SlotChannel(connect(route.address), route.slot)

    def move(self, route: Route) -> bool:
        """Takes in where the leader is now; returns whether that is elsewhere."""
        with self._lock:
            before, known = self._channel, self.route
            if route.term <= known.term or self._closed:
                return False
            self.route = route
            if (route.address, route.slot) == (known.address, known.slot):
                return False
            self._channel, self.peer = SlotChannel(self._connect(route.address), route.slot), route.address
        before.close()
        return True

    def begin(
        self, method: str, header: Header, arrays: Arrays = (), **options: Unpack[CallOptions]
    ) -> Callable[[], Answer]:
        channel, expects = self._channel, options.get("expects", interface.no_arrays)
        options["expects"] = lambda header: () if "moved" in header else expects(header)
        begun = self._led(channel, lambda: channel.begin(method, header, arrays, **options))
        return lambda: self._led(channel, begun)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._channel.close()

    def _led(self, channel: Channel, call: Callable[[], Any]) -> Any:
        """Makes a call, and returns its answer if the copy leads that was asked."""
        try:
            answer = call()
        except CallFailed as exc:
            if channel is not self._channel or (exc.reason == "refused" and not self._leads(channel)):
                raise CallFailed(exc.peer, "moved") from exc
            raise
        except ValueError as exc:  # gRPC's word for a channel that was closed
            if channel is self._channel and not self._closed:
                raise
            raise CallFailed(channel.peer, "moved") from exc
        if isinstance(answer, tuple) and "moved" in answer[0]:
            raise CallFailed(channel.peer, "moved")
        return answer

    def _leads(self, channel: Channel) -> bool:
        """Asks whether a copy leads that found a call wrong: one without a state takes no push."""
        try:
            header, _ = channel.call("status", {}, timeout_s=1.0)
        except CallFailed:
            return False
        return bool(header.get("leads"))


class Copies:
    """The places `(address, slot)` of a shard's copies, one or two; the first leads at the beginning."""

    def __init__(self, connect: Callable[[str], Channel], places: Sequence[tuple[str, int]]):
        self._connect, self.places = connect, tuple(places)
        # To the current leader; connected at the first call.
        self.channel = RoutedChannel(connect, self.route(0, 0))

    def route(self, copy: int, term: int) -> Route:
        """Returns the way to a copy that leads since a term."""
        address, slot = self.places[copy]
        return Route(address=address, slot=slot, term=term)

    def connected(self, copy: int) -> Channel:
        """Returns a channel to a copy, whether it leads or not."""
        address, slot = self.places[copy]
        return SlotChannel(self._connect(address), slot)

    def statuses(self, timeout_s: float, *, give_up_s: float) -> list[dict[str, Any] | None]:
        """Asks the copies for their identity until one answers; None stands for a silent one."""
        # Each question waits `timeout_s`; after `give_up_s` without an answer the shard is lost.
        connects = [functools.partial(self.connected, copy) for copy in range(len(self.places))]
        answers = interface.ask_until_one_answers(connects, timeout_s, give_up_s=give_up_s)
        failures = [x for x in answers if isinstance(x, CallFailed)]
        for exc in failures:
            _LOG.warning("%s does not answer: %s", exc.peer, exc.reason)
        if len(failures) == len(answers):
            silent = " or ".join(exc.peer for exc in failures)
            raise ShardLostError(f"no answer from the parameter server {silent}: {failures[0].why}")
        return [None if isinstance(x, CallFailed) else x for x in answers]


def place_copies(
    connect: Callable[[str], Channel], addresses: Sequence[str], ps: Sequence[str], *, replicas: int
) -> list[Copies]:
    """Places each shard on its own server, and the second of two replicas on the next."""
    after = dict(zip(ps, [*ps[1:], ps[0]], strict=True))
    return [Copies(connect, [(address, 0), (after[address], 1)][:replicas]) for address in addresses]


def routes_in(header: Header) -> list[Route]:
    """Returns the routes in a header."""
    routes = header.get("routes", [])
    if not isinstance(routes, list):
        raise WireError("`routes` must be a list")
    return [from_plain(Route, route) for route in routes]


def slot_of(header: Header, slots: int) -> int:
    """Returns the copy that a call is for."""
    slot = header.get("slot", 0)
    if type(slot) is not int or not 0 <= slot < slots:
        raise WireError(f"`slot` must be an int from 0 to {slots - 1}")
    return slot
